"""DistCAMixin over trainers with arguments of their own; see `test_sft.py` for one with a loss and data of its own."""

from dataclasses import dataclass, field
from typing import Any

import datasets
import pytest
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import hf_distca
from hf_distca.trainer.refusals import ARGUMENTS, GIVEN, given_arguments
from tests.models_and_batches import small_model
from tests.refused import refused


@dataclass
class ChatArguments(TrainingArguments):
    """Arguments of ChatTrainer."""

    end_of_turn: int = field(default=2, metadata={"help": "The token behind every example."})
    learning_rate: float = field(default=0.0, metadata={"help": "None."})


@dataclass
class PlannedChatArguments(hf_distca.DistCAArguments, ChatArguments):
    """Both trainers' arguments in one."""


class ChatTrainer(Trainer):
    """Names arguments in an order of its own, and puts a token behind every example."""

    def __init__(self, model: Any, args: ChatArguments, train_dataset: Any, data_collator: Any = None) -> None:
        ended = train_dataset.map(lambda row: {"input_ids": [*row["input_ids"], args.end_of_turn]})
        super().__init__(model=model, args=args, data_collator=data_collator, train_dataset=ended)


class PlannedChatTrainer(hf_distca.DistCAMixin, ChatTrainer):
    """A chat trainer with planned attention."""


class Opaque(Trainer):
    """Takes arguments without names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class PlannedOpaque(hf_distca.DistCAMixin, Opaque):
    """Behind a trainer whose arguments have no names."""


DATASET = datasets.Dataset.from_dict({"input_ids": [[1, 2]]})


def test_arguments_are_of_both():
    names = set(PlannedChatArguments.__dataclass_fields__)
    assert {"tokens_per_rank", "end_of_turn", "learning_rate", "output_dir"} <= names
    arguments = PlannedChatArguments(output_dir="out", use_cpu=True, end_of_turn=5)
    assert (arguments.learning_rate, arguments.dataloader_num_workers, arguments.end_of_turn) == (0.0, 1, 5)
    with pytest.raises(ValueError, match="tokens_per_rank must be positive"):
        PlannedChatArguments(output_dir="out", use_cpu=True, tokens_per_rank=0)
    with refused(ARGUMENTS[3]):
        PlannedChatArguments(output_dir="out", use_cpu=True, dataloader_drop_last=True)


def test_arguments_by_position(tmp_path):
    def init(model: Any, args: Any = None, data_collator: Any = None, *, callbacks: Any = None) -> None: ...

    given = given_arguments(PlannedChatTrainer, init, (1, 2), {"callbacks": 3})
    assert given.named == {"model": 1, "args": 2, "callbacks": 3}
    options = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": [], "save_strategy": "no", "max_steps": 1}
    arguments = PlannedChatArguments(**options, per_device_train_batch_size=4)
    # The collator is seen by position too: without one the batch size would be refused.
    PlannedChatTrainer(small_model(), arguments, DATASET, DataCollatorWithFlattening())
    with pytest.raises(TypeError, match="takes 0 positional arguments, got 2; pass the others by name"):
        PlannedOpaque(small_model(), arguments)
    with refused(GIVEN[1]):
        PlannedChatTrainer(small_model(), ChatArguments(output_dir=str(tmp_path), use_cpu=True), DATASET)
    trainer = PlannedChatTrainer(small_model(), PlannedChatArguments(**options), DATASET)
    (batch,) = trainer.get_train_dataloader()
    assert batch["input_ids"].tolist() == [[1, 2, 2]]
    trainer.train()
