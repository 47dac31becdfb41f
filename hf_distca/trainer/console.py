"""What a training prints: a line of the log with few figures, and messages.

Messages are of the level that `log_level` names.

Trackers such as W&B and TensorBoard get all figures.
"""

import logging
from collections.abc import Mapping
from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_callback import CallbackHandler

from hf_distca.plan import MicroBatchPlan
from hf_distca.planner.settings import UNBALANCED
from hf_distca.trainer.costs import PROFILE_FILE
from hf_distca.trainer.metrics import PREFIX

logger = logging.getLogger(__name__)

LIBRARY = "hf_distca"
"""Name of the logger above those of all modules of hf_distca."""
PASSIVE = "passive"
"""Value of `log_level` that leaves levels as they are."""


def follow_log_level(args: Any) -> None:
    """Give the library's messages the level that `log_level` names.

    Trainer does so for the messages of transformers.
    """
    library = logging.getLogger(LIBRARY)
    if args.log_level == PASSIVE:
        return
    library.setLevel(args.get_process_log_level())
    if not library.hasHandlers():  # Python then prints warnings and errors only
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"[{LIBRARY}] %(message)s"))
        library.addHandler(handler)


def log_choice(plan: MicroBatchPlan, args: Any, ranks: int) -> None:
    """Log how the first micro-batch of a training is planned, and why."""
    summary, choice = plan.summary, plan.choice
    moved_mb = summary.exchange.bytes_bottleneck / 1e6
    balance = (summary.packed_max_over_mean, summary.max_over_mean, moved_mb)
    outcome = (
        "imbalance of core attention %.2f -> %.2f, %.1f MB through the busiest rank in a layer's "
        "forward"
    )
    if choice is None:
        chosen = f"document_layout={args.document_layout!r}, planning={args.planning.plain()}"
        reason = args.why_nothing_is_compared
        logger.info(
            f"plans follow {chosen}: the planner does not compare plans, because {reason}. First "
            f"micro-batch: {outcome}",
            *balance,
        )
        return
    group = (
        "each on one rank"
        if choice.group == 1
        else f"each on a group of at most {choice.group} of the {ranks} ranks"
    )
    even = (
        "not balanced further"
        if choice.tolerance >= UNBALANCED
        else f"balanced within {choice.tolerance:.0%}"
    )
    logger.info(
        "the planner chose for the first micro-batch: documents %s, core attention %s, "
        "nano-batches: %s. It is the fastest of the plans that were compared, by the costs in "
        "%s: %.1f ms for forward and backward, and %.1f ms if documents were packed in order; "
        f"{outcome}. Other micro-batches may get other choices",
        *(
            group,
            even,
            choice.nano_batches,
            args.device_profile or f"{args.output_dir}/{PROFILE_FILE}",
        ),
        *(choice.seconds * 1e3, choice.packed_seconds * 1e3, *balance),
    )


def for_console(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return logs with a few readable figures in place of all figures of hf_distca.

    All figures are shares and ratios. Imbalance is left out where no core attention moves: whole
    documents then lie where ranks finish together, with all that their tokens take.

    Texts are in ASCII: some terminals cannot print other characters, and raise an error.
    """
    short = {name: value for name, value in logs.items() if not name.startswith(PREFIX)}
    figures = {
        name.removeprefix(PREFIX): value for name, value in logs.items() if name.startswith(PREFIX)
    }
    if "tokens_per_second" in figures:
        short["tokens/s"] = f"{figures['tokens_per_second']:,.0f}"
    if figures.get("exchange_bytes"):
        short["imbalance"] = (
            f"{figures['imbalance_degree_packed']:.2f} -> {figures['imbalance_degree']:.2f}"
        )
    if "exposed_exchange_share" in figures:
        short["exposed wait"] = f"{figures['exposed_exchange_share']:.1%}"
    if "gain_predicted" in figures:
        short["gain"] = f"{figures['gain_predicted']:.2f}"
    if "mfu" in figures:
        short["mfu"] = f"{figures['mfu']:.1%}"
    return short


class ShortProgress(ProgressCallback):
    """transformers' progress bar, which prints few figures beside it."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print a log."""
        base_callback: Any = super()  # without types
        base_callback.on_log(args, state, control, logs=for_console(logs or {}), **kwargs)


class ShortPrinter(PrinterCallback):
    """transformers' printer of logs, which prints few figures."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print a log."""
        base_callback: Any = super()  # without types
        base_callback.on_log(args, state, control, logs=for_console(logs or {}), **kwargs)


SHORT: dict[type[TrainerCallback], type[TrainerCallback]] = {
    ProgressCallback: ShortProgress,
    PrinterCallback: ShortPrinter,
}
"""For each callback of transformers that prints logs, the class that prints few figures."""


def shorten_console(handler: CallbackHandler) -> None:
    """Let transformers' own callbacks print few figures.

    Callbacks of other classes stay as they are.
    """
    for callback in handler.callbacks:
        if type(callback) in SHORT:
            # The same object, because a user may hold it, and may have set its `max_str_len`.
            callback.__class__ = SHORT[type(callback)]
