"""Train the same documents with plain DDP and with hf_distca on CPU processes, and compare.

    python examples/make_checkpoint.py --output runs/checkpoint --hidden_size 128 --layers 2
    --vocab_size 2048 accelerate launch --config_file examples/configs/ddp.yaml examples/demo.py
    --model_name_or_path runs/checkpoint

Documents are source files of the Python standard library. Both trainings see the same documents in
the same steps. Plain DDP packs whole documents in order, without padding, and computes attention
within each document alone.
"""

import argparse
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from statistics import mean, median, quantiles
from threading import Semaphore
from typing import Any, NamedTuple

import datasets
import torch
import transformers
from accelerate.utils import gather_object
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorWithFlattening, Trainer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import hf_distca

WARM_UP = 2
"""Steps at the start that no figure counts.

The first step allocates memory, and in the second DDP forms its buckets.
"""
BAR = 48
"""Characters of the longest bar."""
Documents = list[list[int]]
"""Token ids of each document."""


def main() -> None:
    """Read the options, train twice, print the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model_name_or_path", required=True, help="checkpoint: a name on the Hub or a folder"
    )
    parser.add_argument(
        "--output_dir", default="runs/demo", help="folder for the traces (default: runs/demo)"
    )
    parser.add_argument(
        "--tokens_per_rank",
        type=int,
        default=8192,
        help="tokens of a rank in a step (default: 8192)",
    )
    parser.add_argument(
        "--steps", type=int, default=20, help="steps of each training (default: 20)"
    )
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()

    settings = {
        "output_dir": options.output_dir,
        "max_steps": options.steps,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "ddp_find_unused_parameters": False,
        "dataloader_pin_memory": False,
    }
    traced = min(3, max(options.steps - 3, 0))  # the first three steps never are
    # Arguments first: they connect the processes.
    args = hf_distca.DistCATrainingArguments(
        tokens_per_rank=options.tokens_per_rank, trace_steps=traced, **settings
    )
    ranks = args.world_size
    hide_bars = None if args.process_index == 0 else True  # None: shown on a terminal only
    steps = full_steps(
        read_documents(options, ranks, hide_bars), ranks * options.tokens_per_rank, options.steps
    )
    if args.process_index == 0:
        print(
            f"Training {options.steps} steps with plain DDP and with hf_distca, in turns ...",
            flush=True,
        )

    def load(attention: str) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(
            options.model_name_or_path, attn_implementation=attention, dtype=torch.float32
        )

    plain_args = transformers.TrainingArguments(
        **settings, per_device_train_batch_size=1, remove_unused_columns=False
    )
    packed = [{"documents": part} for step in steps for part in packed_in_order(step, ranks)]
    documents = [{"input_ids": document} for step in steps for document in step]
    plain, planned = train_in_turns(
        Trainer(model=load(PACKED), args=plain_args, train_dataset=packed, data_collator=flatten),
        hf_distca.DistCATrainer(model=load("distca"), args=args, train_dataset=documents),
        Progress(2 * options.steps, shown=args.process_index == 0),
    )

    if args.process_index == 0:
        of_steps = [imbalance(packed_in_order(step, ranks)) for step in steps[WARM_UP:]]
        print_table({"plain DDP": plain._replace(imbalance=mean(of_steps)), "hf_distca": planned})
    gather_object([None])  # every process waits for rank 0
    torch.distributed.destroy_process_group()


# ---- the documents, and who trains on which


def read_documents(options: argparse.Namespace, ranks: int, hide_bar: bool | None) -> Documents:
    """Source files of the standard library as tokens, in random order; those that fit on one rank.

    Plain packing can train on longer ones only in pieces.
    """
    tokenizer = AutoTokenizer.from_pretrained(options.model_name_or_path)
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(
        path for path in root.rglob("*.py") if "-packages" not in str(path.relative_to(root))
    )
    Random(0).shuffle(paths)
    documents: Documents = []
    left = (
        options.steps * options.tokens_per_rank * ranks * 3 // 2
    )  # more tokens than all steps take, which cut some
    bar = tqdm(
        total=left,
        desc="Making tokens",
        unit=" tokens",
        unit_scale=True,
        disable=hide_bar,
        leave=False,
    )
    for path in paths:
        with suppress(UnicodeDecodeError):
            tokens = tokenizer(path.read_text(encoding="utf-8"), verbose=False)["input_ids"]
            if 32 <= len(tokens) <= options.tokens_per_rank:
                documents.append(tokens)
                left -= len(tokens)
                bar.update(len(tokens))
        if left < 0:
            break
    bar.close()
    return documents


def full_steps(documents: Documents, capacity: int, count: int) -> list[Documents]:
    """Return the documents of each step, in order.

    A step has `capacity` tokens: its last document is cut short to fill them.
    """
    steps: list[Documents] = []
    of_step: Documents = []
    for document in documents:
        of_step.append(document[: capacity - sum(map(len, of_step))])
        if sum(map(len, of_step)) == capacity:
            steps.append(of_step)
            of_step = []
    return steps[:count]


def packed_in_order(step: Documents, ranks: int) -> list[Documents]:
    """Return the whole documents of each rank, in order, with tokens as equal as possible."""
    parts: list[Documents] = [[] for _ in range(ranks)]
    total, before = sum(map(len, step)), 0
    for document in step:
        parts[int((before + len(document) / 2) / total * ranks)].append(document)
        before += len(document)
    return parts


def imbalance(parts: list[Documents]) -> float:
    """Query-key pairs of the busiest rank over the mean."""
    pairs = [sum(len(document) * (len(document) + 1) / 2 for document in part) for part in parts]
    return max(pairs) / mean(pairs)


# ---- plain training


def attend_within_documents(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Any,
    *,
    position_ids: Tensor,
    **more: Any,
) -> tuple[Tensor, None]:
    """Compute attention document by document, as FlashAttention does for packed rows on GPUs."""
    starts = torch.nonzero(position_ids[0] == 0).flatten().tolist()
    outputs = []
    for start, stop in zip(starts, [*starts[1:], query.shape[2]], strict=True):
        rows = (x[:, :, start:stop] for x in (query, key, value))
        outputs.append(
            sdpa_attention_forward(module, *rows, None, scaling=more["scaling"], is_causal=True)[0]
        )
    return torch.cat(outputs, dim=1), None


PACKED = "within_documents"
transformers.AttentionInterface.register(PACKED, attend_within_documents)


def flatten(examples: list[dict[str, Documents]]) -> dict[str, Tensor]:
    """Put a rank's documents into one row without padding."""
    (example,) = examples
    return DataCollatorWithFlattening()(
        [{"input_ids": document} for document in example["documents"]]
    )


# ---- training and measuring


class Measured(NamedTuple):
    """Figures of a training on all ranks.

    Attributes:
        losses: of each step.
        seconds: of each step after the first ones.
        busy: [steps][ranks] seconds of each of these steps in which a rank did not wait for
            another.
        imbalance: query-key pairs of the busiest rank over the mean.
    """

    losses: list[float]
    seconds: list[float]
    busy: list[list[float]]
    imbalance: float


class Progress:
    """A bar of the steps of both trainings on a terminal; elsewhere a line after each quarter."""

    def __init__(self, steps: int, *, shown: bool) -> None:
        on_terminal = sys.stderr.isatty()
        self._steps, self._done = steps, 0
        self._prints_lines = shown and not on_terminal
        self._began = time.perf_counter()
        self._bar = tqdm(
            total=steps,
            desc="Steps of both trainings",
            disable=not (shown and on_terminal),
            leave=False,
        )

    def update(self) -> None:
        """Count a step."""
        self._done += 1
        self._bar.update()
        if self._prints_lines and self._done % max(self._steps // 4, 1) == 0:
            seconds = time.perf_counter() - self._began
            print(f"{self._done} of {self._steps} steps, {seconds:.0f} s", flush=True)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


class Turns(transformers.TrainerCallback):
    """Let two trainings take turns, a step each, so that other load slows both alike."""

    def __init__(
        self, trainer: Trainer, progress: Progress, mine: Semaphore, others: Semaphore
    ) -> None:
        self._trainer, self._progress, self._mine, self._others = trainer, progress, mine, others
        self._seconds: list[float] = []
        self._busy: list[float] = []
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.add_callback(self)

    def train(self) -> None:
        """Train: a step in each turn, with all that comes before the first step and after the last.

        Collectives of the two trainings therefore never mix.
        """
        self._take_turn()
        try:
            self._trainer.train()
        finally:
            self._others.release()

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        """Note the times of the step, and wait for the next turn."""
        self._seconds.append(time.perf_counter() - self._began[0])
        self._busy.append(busy_seconds() - self._began[1])
        self._progress.update()
        self._others.release()
        self._take_turn()

    def _take_turn(self) -> None:
        self._mine.acquire()
        self._began = time.perf_counter(), busy_seconds()

    def measured(self) -> Measured:
        """Gather the figures of all ranks."""
        log = [entry for entry in self._trainer.state.log_history if "loss" in entry]
        return Measured(
            [entry["loss"] for entry in log],
            self._seconds[WARM_UP:],
            [list(ranks) for ranks in zip(*gather_object([self._busy[WARM_UP:]]), strict=True)],
            mean(entry.get("distca/imbalance_degree", 0.0) for entry in log[WARM_UP:]),
        )


def busy_seconds() -> float:
    """Return how long this thread has computed, or waited for a core that another program had."""
    try:
        on_a_core, for_a_core, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except OSError:  # a kernel that does not count it
        return time.thread_time()
    return (int(on_a_core) + int(for_a_core)) / 1e9


def train_in_turns(first: Trainer, second: Trainer, progress: Progress) -> list[Measured]:
    """Train with both, a step of one after a step of the other."""
    may_step = Semaphore(1), Semaphore(0)
    turns = [Turns(first, progress, *may_step), Turns(second, progress, *reversed(may_step))]
    with closing(progress), ThreadPoolExecutor(2) as pool:
        for training in [pool.submit(each.train) for each in turns]:
            training.result()
    return [each.measured() for each in turns]


# ---- the comparison


def print_table(found: dict[str, Measured]) -> None:
    """Print both trainings side by side, and one step of each as bars."""
    plain, planned = found.values()
    rows = {
        "step time, median": lambda each: f"{median(each.seconds):.2f} s",
        "idle share": lambda each: (
            f"{max(0.0, 1 - sum(map(mean, each.busy)) / sum(each.seconds)):.0%}"
        ),
        "imbalance of attention": lambda each: f"{each.imbalance:.2f}",
        "loss, first step": lambda each: f"{each.losses[0]:.4f}",
        "loss, last step": lambda each: f"{each.losses[-1]:.4f}",
    }
    print(f"\n{'':<24}" + "".join(f"{name:>12}" for name in found))
    for name, figure in rows.items():
        print(f"{name:<24}{figure(plain):>12}{figure(planned):>12}")
    gains = [before / after for before, after in zip(plain.seconds, planned.seconds, strict=True)]
    apart = max(abs(a - b) for a, b in zip(plain.losses, planned.losses, strict=True))
    lower, middle, upper = quantiles(gains, n=4)
    print(
        f"\nSpeed-up {middle:.2f}× (quartiles {lower:.2f} to {upper:.2f}); losses differ by "
        f"{apart:.0e} at most."
    )

    step = gains.index(sorted(gains)[len(gains) // 2])
    print(f"\nStep {step + WARM_UP + 1}, whose speed-up is {gains[step]:.2f}×: █ computes, · waits")
    scale = BAR / max(plain.seconds[step], planned.seconds[step])
    for name, each in found.items():
        for rank, busy in enumerate(each.busy[step]):
            computes = min(round(busy * scale), whole := round(each.seconds[step] * scale))
            print(f"  {name:<10} rank {rank}  {'█' * computes}{'·' * (whole - computes)}")
    print(
        "\nIdle share: time in which a rank waits for the others, over all time. Imbalance: "
        "query-key pairs of the busiest\nrank over the mean. Steps after the first two."
    )


if __name__ == "__main__":
    main()
