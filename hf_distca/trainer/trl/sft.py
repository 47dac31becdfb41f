"""DistCASFTTrainer: TRL's SFTTrainer on packed documents with balanced core attention."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_distca.checks.data_rules import Data
from hf_distca.checks.refusal import PackageError
from hf_distca.checks.run_rules import Run
from hf_distca.collator.documents import is_stream, named_datasets
from hf_distca.collator.images import ProcessedDocuments
from hf_distca.collator.texts import check_texts
from hf_distca.plan import PLAN_KEY
from hf_distca.trainer.arguments import DistCAArguments
from hf_distca.trainer.evaluation import EvaluationLoader, Predictions
from hf_distca.trainer.trainer import DistCAMixin
from hf_distca.units import setting

try:
    from trl import SFTConfig, SFTTrainer
except ModuleNotFoundError as error:
    if error.name != "trl":
        raise
    raise PackageError(
        "DistCASFTTrainer and DistCASFTConfig are based on TRL, which is not installed; run pip "
        "install 'hf_distca[trl]'"
    ) from error

DATASETS = ("train_dataset", "eval_dataset")
"""Arguments of the trainer that are data sets."""
MEANS = ("entropy", "mean_token_accuracy")
"""TRL's metrics that are means over the targets of a micro-batch."""


@dataclass
class DistCASFTConfig(DistCAArguments, SFTConfig):
    """`trl.SFTConfig` with the settings of `DistCAConfig`."""

    max_length: int | None = setting(
        None,
        "TRL cuts documents to this many tokens when it prepares the data. None keeps documents "
        "whole; long_documents then decides about documents of more tokens than all ranks hold.",
    )


class DistCASFTTrainer(DistCAMixin, SFTTrainer):
    """TRL's `SFTTrainer` on packed documents with balanced core attention.

    TRL prepares the data (chat templates, labels of completions or of assistant messages) and makes
    the LoRA adapters of `peft_config`. TRL computes loss, entropy and token accuracy without whole
    logits. hf_distca packs the documents. Loss and metrics are means over all targets of all ranks
    and micro-batches.

    The arguments are those of `trl.SFTTrainer`; `args` is a `DistCASFTConfig`. TRL loads a model
    that is given by name, which then gets planned attention.
    """

    def _initialize(self, arguments: dict[str, Any]) -> None:
        # For "train" and "eval": targets of the micro-batches since the last log, on all ranks.
        self._targets: dict[str, list[float]] = defaultdict(list)
        super()._initialize(arguments)
        if self._is_vision_dataset:
            for name in DATASETS:
                setattr(self, name, self._processed(getattr(self, name), name))
        for name in DATASETS:
            _check_examples_remain(
                self._unprepared[name], getattr(self, name), name, arguments["args"].max_length
            )

    def _prepare_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        args: Any = arguments["args"]
        # The data sets before TRL prepares them.
        self._unprepared = {name: arguments.get(name) for name in DATASETS}
        if arguments.get("formatting_func") is None:  # else it makes the text
            for name, argument in self._unprepared.items():
                for key, dataset in named_datasets(argument, name).items():
                    check_texts(dataset, key, args.dataset_text_field)
        return super()._prepare_arguments(arguments)

    def _processed(self, given: Any, name: str) -> Any:
        """Return data sets whose documents TRL's collator for images makes when they are read."""
        if given is None or isinstance(given, str | ProcessedDocuments):
            return given
        if isinstance(given, dict):
            return {
                key: self._processed(dataset, f"{name}[{key!r}]") for key, dataset in given.items()
            }
        if is_stream(given):
            raise Data.STREAM_OF_IMAGES.error(name=name)
        args: Any = self.args
        return ProcessedDocuments(given, self.data_collator, name, args.dataset_num_proc)

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as `SFTTrainer.evaluate` does."""
        if self._is_vision_dataset:
            eval_dataset = self._processed(eval_dataset, "eval_dataset")
        return super().evaluate(eval_dataset, *args, **kwargs)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Return TRL's loss over the targets of all ranks.

        Note their number for the metrics.
        """
        mode = "train" if self.model.training else "eval"
        loaders = self.accelerator.gradient_state
        if loaders.in_dataloader:
            # Otherwise accelerate takes TRL's counts for examples and drops some at the end.
            loaders.active_dataloader.remainder = -1
        if mode == "eval":
            # Otherwise TRL divides the loss of experts by the micro-batches of the last step.
            self.current_gradient_accumulation_steps = 1
        tokens_before = self._total_train_tokens
        result = super().compute_loss(model, inputs, *args, **kwargs)
        # Not the mixin's method, which never returns 0.
        targets: Any = super(DistCAMixin, self)._get_num_items_in_batch([inputs], self.args.device)
        self._targets[mode].append(float(targets))
        if mode == "train":
            # Replaces what TRL has counted, by the tokens of all documents on all ranks.
            plan = inputs[PLAN_KEY].plan
            self._total_train_tokens = tokens_before + plan.document_tokens
            self._metrics[mode]["num_tokens"] = [self._total_train_tokens]
        return result

    def _new_predictions(self, loader: EvaluationLoader) -> Predictions:
        raise Run.NO_LOGITS_OF_TRL.error(trainer=type(self).__name__)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with TRL's metrics as means over targets instead of micro-batches."""
        mode = "train" if self.model.training else "eval"
        targets = self._targets.pop(mode, [])
        for name in MEANS:
            values = self._metrics[mode].get(name)
            if values:
                weighted = sum(value * count for value, count in zip(values, targets, strict=True))
                self._metrics[mode][name] = [weighted / max(sum(targets), 1)]
        super().log(logs, *args, **kwargs)


def _check_examples_remain(
    unprepared: Any, prepared: Any, name: str, max_length: int | None
) -> None:
    """Raise ValueError if TRL dropped every example of a data set because of `max_length`.

    Args:
        unprepared, prepared: the data set, or a dictionary of several, before and after TRL
            prepared it.
        name: the trainer's argument.
    """
    if max_length is None:
        return
    datasets_before = named_datasets(unprepared, name)
    for key, dataset in named_datasets(prepared, name).items():
        dataset_before = datasets_before.get(key, ())
        if is_stream(dataset_before) or is_stream(dataset):
            continue
        if len(dataset_before) > 0 and len(dataset) == 0:
            raise Data.NO_ANSWERS.error(
                name=key, examples=len(dataset_before), max_length=max_length
            )
