"""Plugin of ms-swift: fine-tuning and DPO with planned core attention, from its commands."""

import sys
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import Field, dataclass, field, fields, make_dataclass
from functools import partial
from typing import Any

from transformers import Trainer

from hf_distca.checks.integration_rules import SWIFT, SWIFT_DOCUMENTS, SWIFT_PACKED, Swift
from hf_distca.checks.refusal import PackageError, check
from hf_distca.config import DistCAConfig
from hf_distca.trainer.arguments import DistCAArguments, DistCAPaddedArguments
from hf_distca.trainer.padded import DistCAPaddedMixin
from hf_distca.trainer.trainer import DistCAMixin

try:
    from swift.dataset import LazyLLMDataset
    from swift.rlhf_trainers import DPOConfig, DPOTrainer
    from swift.trainers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerFactory
except ModuleNotFoundError as error:
    if error.name != "swift":
        raise
    raise PackageError(
        "hf_distca.integrations.swift is a plugin of ms-swift, which is not installed; run pip "
        "install ms-swift"
    ) from error

DATASETS = ("train_dataset", "eval_dataset")
"""Arguments of the trainer that are data sets."""


@dataclass
class DistCASwiftArguments(DistCAArguments, Seq2SeqTrainingArguments):
    """ms-swift's arguments of fine-tuning with the settings of `DistCAConfig`."""


@dataclass
class DistCASwiftDPOConfig(DistCAPaddedArguments, DPOConfig):
    """ms-swift's arguments of DPO with the settings of `DistCAConfig`."""


class TransformersCheckpointing:
    """Activation checkpointing as transformers' trainer does it.

    ms-swift replaces `torch.utils.checkpoint.checkpoint` and wraps all modules of layers, which
    hides the setting from planned layers.
    """

    def _fix_gradient_checkpointing(self) -> None:
        """Leave torch's function as it is."""

    def _prepare_gradient_checkpointing(self, model: Any) -> None:
        """Leave the rest to transformers."""
        model.config.use_cache = False


class TransformersSteps(TransformersCheckpointing, Seq2SeqTrainer):
    """ms-swift's trainer with the loader, inputs and loss of transformers' trainer.

    Those of ms-swift divide examples among ranks, and read labels that are not shifted.
    """

    def get_train_dataloader(self) -> Any:
        """Return the loader of the training data as transformers does."""
        return Trainer.get_train_dataloader(self)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> Any:
        """Move the inputs to the device as transformers does."""
        return Trainer._prepare_inputs(self, inputs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss as transformers does."""
        return Trainer.compute_loss(self, *args, **kwargs)


class DistCASwiftTrainer(DistCAMixin, TransformersSteps):
    """ms-swift's trainer of `swift pt` and `swift sft`, on packed documents."""

    def _prepare_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        check((*SWIFT, *SWIFT_PACKED), arguments)
        args: Any = arguments["args"]
        encoded = {name: _encoded(arguments.get(name), name, args) for name in DATASETS}
        return {**arguments, **encoded}


class DistCASwiftDPOTrainer(DistCAPaddedMixin, TransformersCheckpointing, DPOTrainer):
    """ms-swift's trainer of `swift rlhf --rlhf_type dpo`, whose batches are computed packed."""

    def _prepare_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        check(SWIFT, arguments)
        return arguments


class _Encoder:
    """Makes `input_ids` and `labels` of a chat, by a template of ms-swift."""

    def __init__(self, encode: Any, name: str) -> None:
        self._encode = encode
        self._name = name

    def __call__(self, chat: Mapping[str, Any]) -> dict[str, Any]:
        document = self._encode(dict(chat))
        if document.get("loss_scale") is not None:
            raise Swift.WEIGHTS.error(name=self._name)
        labels = document.get("labels") or document["input_ids"]
        return {"input_ids": document["input_ids"], "labels": labels}


def _encoded(dataset: Any, name: str, args: Any) -> Any:
    """Return a data set of ms-swift with the tokens of its chats; None without a data set.

    Args:
        name: name of the argument, for errors.
    """
    if dataset is None or (isinstance(dataset, list) and not dataset):
        return None
    check(SWIFT_DOCUMENTS, {"name": name, "has_chats": isinstance(dataset, LazyLLMDataset)})
    chats = dataset.dataset
    with args.main_process_first(desc=f"tokens of {name}"):
        return chats.map(
            _Encoder(dataset.encode_func, name), remove_columns=chats.column_names, desc="Tokens"
        )


def plan_attention(module: str, **settings: Any) -> None:
    """Let ms-swift train with planned core attention.

    Call it in the file that is given as `--external_plugins`.

    ```python
    from hf_distca.integrations.swift import plan_attention

    plan_attention(__name__, tokens_per_rank="32k")
    ```

    Args:
        module: `__name__` of that file. ms-swift finds the classes of arguments in it.
        settings: settings of `DistCAConfig`.
    """
    ours = f"{__name__}."
    trainers = {"causal_lm": DistCASwiftTrainer, "dpo": DistCASwiftDPOTrainer}
    arguments = {"causal_lm": DistCASwiftArguments, "dpo": DistCASwiftDPOConfig}
    for task, base in arguments.items():
        made = _with_defaults(base, settings, module)
        setattr(sys.modules[module], base.__name__, made)
        TrainerFactory.TRAINING_ARGS_MAPPING[task] = f"{module}.{base.__name__}"
        TrainerFactory.TRAINER_MAPPING[task] = ours + trainers[task].__name__


def _with_defaults(base: type, settings: Mapping[str, Any], module: str) -> type:
    """Return a dataclass with other defaults of some settings."""
    known = {setting.name: setting for setting in fields(DistCAConfig)}
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise Swift.UNKNOWN.error(name=unknown[0], names=", ".join(known))
    changed: list[tuple[str, Any, Field[Any]]] = [
        (name, known[name].type, field(default_factory=partial(deepcopy, value)))
        for name, value in settings.items()
    ]
    made = make_dataclass(base.__name__, changed, bases=(base,))
    made.__module__ = module  # from where pickle imports it
    return made
