"""DistCAAsyncGRPOTrainer: TRL's asynchronous GRPO on planned micro-batches of rollouts.

The queue of rollouts, the worker that makes them, the transfer of weights to the inference server,
the loss and its metrics are TRL's. A micro-batch has the rollouts that fit into all ranks together.
Its rows are planned, with prefix sharing, and a rollout may lie on several ranks.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel
from transformers.utils.logging import get_logger

from hf_distca.checks.refusal import PackageError
from hf_distca.collator.collation import TARGET_ROWS
from hf_distca.collator.rollouts import (
    PlannedRollouts,
    RankBatch,
    Rollout,
    fitting_micro_batches,
)
from hf_distca.dispatch.bound import BoundPlan
from hf_distca.dispatch.values_of_all_ranks import on_all_ranks
from hf_distca.models.loading import load_model
from hf_distca.models.sharing import shares_prefixes, why_training_shares_nothing
from hf_distca.patches.targets import repeat_target_rows
from hf_distca.plan import PLAN_KEY
from hf_distca.trainer.arguments import DistCAPaddedArguments
from hf_distca.trainer.planned import PlannedTraining
from hf_distca.units import setting

try:
    from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig
    from trl.experimental.async_grpo.async_grpo_trainer import (
        AsyncGRPOTrainer,
        DataCollatorForRollout,
    )
    from trl.trainer.base_trainer import _BaseTrainer
    from trl.trainer.utils import compute_flops_per_token, get_peak_flops_per_device
except ModuleNotFoundError as error:
    if str(error.name).partition(".")[0] != "trl":
        raise
    raise PackageError(
        "DistCAAsyncGRPOTrainer is based on trl.experimental.async_grpo of TRL 1.16, which is not "
        "installed; run pip install 'hf_distca[trl]'"
    ) from error

logger = get_logger(__name__)

TARGETS, TARGET_NUMBERS = "targets", "target_numbers"
"""Keys of a batch: the tokens that this rank's rows predict, and the numbers of these targets among
those of all ranks."""
TREE = "tree_"
"""Beginning of the names of what TRL's attention takes."""
ATTENTION_ALONE = frozenset(("full_attention", "sliding_attention"))
"""Types of layers that TRL's own trainer accepts."""
SINKS = ".sinks"
"""End of the names of parameters that TRL's own trainer refuses."""


@dataclass
class DistCAAsyncGRPOConfig(DistCAPaddedArguments, AsyncGRPOConfig):
    """`trl.experimental.async_grpo.AsyncGRPOConfig` with the settings of `DistCAConfig`."""

    token_budget: int | None = setting(
        0,
        "A micro-batch has the rollouts that fit into all ranks together, with tokens_per_rank "
        "rows on each. A number above 0 is the default of tokens_per_rank.",
    )

    @property
    def default_tokens_per_rank(self) -> int:
        """TRL's `token_budget`, if it is set."""
        return self.token_budget or super().default_tokens_per_rank

    def __post_init__(self) -> None:
        super().__post_init__()
        self.token_budget = 0  # None asks the inference server for its limit


class _AnyModel:
    """Model for TRL's trainer, whose kinds of layers are hidden while TRL looks for some of them.

    TRL refuses what its own attention cannot compute: layers that mix rows otherwise than by
    attention, attention in chunks, and attention sinks. `show` ends the hiding.
    """

    def __init__(self) -> None:
        self._model: PreTrainedModel | None = None
        self._layer_types: Any = None

    def load(
        self, given: str | PreTrainedModel, *, attn_implementation: str, **options: Any
    ) -> PreTrainedModel:
        """Load a model by its name, without TRL's `attn_implementation`; or take a loaded one."""
        model = load_model(given, options) if isinstance(given, str) else given
        self._model = model
        text = model.config.get_text_config()
        self._layer_types = getattr(text, "layer_types", None)
        if not ATTENTION_ALONE.issuperset(self._layer_types or ()):
            vars(text)["layer_types"] = None
        named = model.named_parameters
        vars(model)["named_parameters"] = lambda *args, **kwargs: (
            (name, weight) for name, weight in named(*args, **kwargs) if not name.endswith(SINKS)
        )
        return model

    def show(self) -> None:
        """Show all layers and parameters of the model."""
        assert self._model is not None
        del vars(self._model)["named_parameters"]
        if self._layer_types is not None:
            vars(self._model.config.get_text_config())["layer_types"] = self._layer_types


def _peak_flops(accelerator: Accelerator, dtype: str) -> float | None:
    """Return TRL's figure of a GPU; None for a CPU, of which TRL would ask CUDA."""
    if accelerator.device.type != "cuda":
        return None
    flops: float | None = get_peak_flops_per_device(accelerator, dtype)
    return flops


def _flops_per_token(config: Any, tokens: int) -> float:
    """Return TRL's count; NaN, which TRL leaves out, for a model whose parts TRL does not know."""
    try:
        return float(compute_flops_per_token(config, tokens))
    except AttributeError:
        return math.nan


def with_functions(method: Callable[..., Any], **functions: Any) -> Callable[..., Any]:
    """Return a copy of a method that calls other functions in place of some of its module's.

    The module, and the method itself, stay as they are.

    Args:
        method: a plain function.
        functions: by the names that the method calls them by.

    Raises:
        PackageError: The method does not call all of these names.
    """
    function: Any = method
    unknown = functions.keys() - set(function.__code__.co_names)
    if unknown:
        raise PackageError(
            f"{function.__qualname__} of {function.__module__} no longer calls "
            f"{', '.join(sorted(unknown))}; install TRL 1.16, with which hf_distca is tested"
        )
    copied = FunctionType(
        function.__code__,
        {**function.__globals__, **functions},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


class _Checked(_BaseTrainer):
    """Base after TRL's trainer, whose `__init__` runs when TRL has looked at the model."""

    _loaded: _AnyModel

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._loaded.show()
        trl_trainer: Any = super()
        trl_trainer.__init__(*args, **kwargs)


class _Endless(IterableDataset[dict[str, Any]]):
    """Data set of what a function yields."""

    def __init__(self, make: Callable[[], Iterator[dict[str, Any]]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._make()


class DistCAAsyncGRPOTrainer(PlannedTraining, AsyncGRPOTrainer, _Checked):
    """TRL's asynchronous `AsyncGRPOTrainer` with rollouts balanced over all ranks.

    `args` is a `DistCAAsyncGRPOConfig`, and `model` is a name or a loaded model. Rollouts, rewards,
    the transfer of weights, the loss and its metrics are TRL's. A micro-batch has the rollouts that
    fit into all ranks together. A rollout may have up to ranks * tokens_per_rank tokens, on several
    ranks. Equal prefixes are computed once in a micro-batch. Models may have layers that TRL's
    trainer refuses: hybrids and attention sinks.
    """

    packs_documents = False

    def _initialize(self, arguments: dict[str, Any]) -> None:
        self._initialize_trainer(self._checked(arguments))
        self._prepare_planned()
        repeat_target_rows(self.model)
        self._shares = shares_prefixes(
            self.args.share_prefixes, why_training_shares_nothing(self), self.args.process_index
        )

    def _initialize_trainer(self, arguments: dict[str, Any]) -> None:
        self._loaded = _AnyModel()
        trl_init = with_functions(
            AsyncGRPOTrainer.__init__,
            create_model_from_path=self._loaded.load,
            get_peak_flops_per_device=_peak_flops,
        )
        trl_init(self, **arguments)
        del self._loaded

    # Data

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of this rank's part in the micro-batches of rollouts."""
        super().get_train_dataloader()  # makes the data set that reads the queue
        return DataLoader(
            _Endless(self._micro_batches), batch_size=None, collate_fn=lambda batch: batch
        )

    def _micro_batches(self) -> Iterator[dict[str, Any]]:
        """Yield this rank's part in each micro-batch, which rank 0 takes from the queue.

        A collective for each.
        """
        groups = self.dispatcher.groups
        complete: Iterator[list[Rollout]] = iter(())
        queued: Any = self._rollout_dataset
        if self.accelerator.is_main_process:
            complete = fitting_micro_batches(
                queued,
                self.dispatcher.settings,
                self._drop,
                shares=self._shares,
            )
        while True:
            rollouts = groups.broadcast_checked(lambda: next(complete), contents="rollouts")
            planned = PlannedRollouts.of(rollouts, self.dispatcher.settings, shares=self._shares)
            rows_of_ranks = planned.rows_of_ranks(groups.ranks)
            if self.accelerator.is_main_process:
                self._log_rollouts(rollouts, rows_of_ranks)
            rows = sum(len(rank.tokens) for rank in rows_of_ranks)
            yield self._inputs(planned.batch(groups.rank), rows, len(rollouts))

    def _drop(self, tokens: int) -> None:
        """Count a rollout that is too long, as TRL does."""
        logger.warning(
            "a rollout of %s tokens is dropped: no more than %s fit, see tokens_per_rank",
            tokens,
            self.dispatcher.settings.document_capacity,
        )
        self._metrics["train"]["batch/dropped_oversize_total"].append(1.0)

    def _log_rollouts(self, rollouts: list[Rollout], rows_of_ranks: list[Any]) -> None:
        """Log TRL's metrics of a micro-batch."""
        self._trained_groups.update(rollout["group_id"] for rollout in rollouts)
        collator: Any = DataCollatorForRollout(
            pad_token_id=0, metrics=self._metrics["train"], token_budget=self.args.tokens_per_rank
        )
        no_padding = torch.ones(sum(len(rank.tokens) for rank in rows_of_ranks), dtype=torch.bool)
        collator._log_metrics(rows=rows_of_ranks, all_examples=rollouts, padded=no_padding)

    def _inputs(self, batch: RankBatch, rows: int, rollouts: int) -> dict[str, Any]:
        """Return what TRL's loss takes, and the rank's part under PLAN_KEY.

        Args:
            rows: rows of all ranks.
            rollouts: number of rollouts of the micro-batch.
        """
        targets = len(batch.old_log_probs)
        none = torch.zeros((1, 0), dtype=torch.int64)
        return {
            "input_ids": batch.input_ids,
            "position_ids": batch.position_ids,
            "attention_mask": torch.ones_like(batch.input_ids),
            "shift_labels": torch.full_like(batch.input_ids, -100),  # `batch` has the targets
            # The targets of all ranks, in the order of their numbers.
            "token_index": torch.arange(targets)[None],
            "old_log_probs": batch.old_log_probs[None],
            "advantages": batch.advantages[None],
            "segment_id": batch.numbers[None],
            # TRL divides by a rank's share of the targets; here each rank sums over all targets.
            "global_n_tokens": torch.tensor([float(targets * self.dispatcher.groups.ranks)]),
            "global_n_forward_tokens": torch.tensor([float(rows)]),
            "mean_seq_len": torch.tensor([rows / rollouts]),
            **{f"{TREE}{name}": none for name in ("kv_index", "cu_seqlens_q", "cu_seqlens_k")},
            f"{TREE}max_seqlens": torch.zeros((1, 2), dtype=torch.int64),
            PLAN_KEY: batch.plan,
            TARGETS: batch.labels,
            TARGET_ROWS: batch.target_rows,
            TARGET_NUMBERS: batch.targets,
        }

    # Training

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return the micro-batches of an optimizer step as Trainer does."""
        self._begin_step()
        if self.dispatcher.remote is not None:
            self.dispatcher.remote.refresh()
        return super().get_batch_samples(*args, **kwargs)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Move the inputs to the device and bind their plan to this rank."""
        inputs = super()._prepare_inputs(inputs)
        bound = self.dispatcher.bind(inputs[PLAN_KEY])
        bound.target_rows = inputs[TARGET_ROWS]
        self._log_choice(bound.plan)
        self.meter.count(bound)
        return {**inputs, PLAN_KEY: bound}

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Return TRL's loss over the targets of all ranks, the same on every rank."""
        bound: BoundPlan = inputs[PLAN_KEY]
        targets = inputs["token_index"].numel()
        trained_tokens = self._step_trained_tokens + targets

        def planned(shift_labels: Tensor, **arguments: Any) -> Any:
            """Run the model on this rank's rows, and return the log-probs of all targets."""
            stock = {k: v for k, v in arguments.items() if not k.startswith(TREE)}
            output = model(**stock, shift_labels=inputs[TARGETS], **{PLAN_KEY: bound})
            self._check_plan_arrived(bound)
            numbers = inputs[TARGET_NUMBERS]
            values = torch.stack([output.log_probs[0], output.entropy[0]], 1)[: len(numbers)]
            values = on_all_ranks(values, numbers, targets, self.dispatcher.groups)
            output.log_probs, output.entropy = values.unbind(1)
            return output

        trl_trainer: Any = super()
        loss = trl_trainer.compute_loss(planned, inputs, *args, **kwargs)
        self._step_trained_tokens = trained_tokens  # TRL has counted the targets for each rank
        self._begin_backward()
        return loss

    def _log_step_metrics(self) -> None:
        """Log TRL's figures of a step, also of models whose FLOPs TRL cannot count."""
        with_functions(
            AsyncGRPOTrainer._log_step_metrics, compute_flops_per_token=_flops_per_token
        )(self)
