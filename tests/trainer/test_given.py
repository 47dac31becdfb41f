"""What trainers are given: text and model names; arguments of other trainers that DistCAMixin is
put before.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import datasets
import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import (
    DataCollatorWithFlattening,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    training_args,
)

from hf_distca import DistCAArguments, DistCAMixin, DistCATrainingArguments
from hf_distca.checks.argument_rules import GIVEN, PACKED_ARGUMENTS, WITHOUT_SETTINGS
from hf_distca.checks.data_rules import Data
from hf_distca.trainer.planned import arguments_by_name
from tests.models_and_batches import small_model
from tests.refused import refused
from tests.trainer.chats import tokenizer
from tests.trainer.small_trainers import make_trainer

TEXTS = ["w1 w2 w3", "w4 [end]", "w5", "w6 w7 w8 w9"]
TOKENS = [[6, 7, 8, 2], [9, 2], [10, 2], [11, 12, 13, 14, 2]]
STEP = {"max_steps": 1, "save_strategy": "no"}
OPTIONS: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True, **STEP}


def make(folder: Any, data: Any, model: Any = None, given: Any = None, **arguments: Any) -> Any:
    given = {"train_dataset": data, "processing_class": tokenizer(), **(given or {})}
    return make_trainer(str(folder), model=model, given=given, **STEP, **arguments)


def of_texts(column: str = "text") -> datasets.Dataset:
    return datasets.Dataset.from_list(
        [{column: text, "source": number} for number, text in enumerate(TEXTS)]
    )


def tokens_in(dataset: Any) -> list[list[int]]:
    assert all(row.keys() == {"input_ids"} for row in dataset)
    return [row["input_ids"] for row in dataset]


class Texts(IterableDataset[dict[str, Any]]):
    """A stream of torch."""

    def __init__(self, rows: Any) -> None:
        self.rows = list(rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


def test_tf32_is_set_as_transformers_sets_it(tmp_path, monkeypatch):
    """GPUs alone have it."""
    settings: list[bool] = []
    monkeypatch.setattr(training_args, "is_torch_tf32_available", lambda: True)
    monkeypatch.setattr(training_args, "enable_tf32", settings.append)
    for tf32 in (True, False, None):
        DistCATrainingArguments(str(tmp_path), **OPTIONS, tf32=tf32)
    assert settings == [True, False]


@pytest.mark.parametrize(
    "made_of", [datasets.Dataset.flatten, list, datasets.Dataset.to_iterable_dataset, Texts]
)
def test_text_is_tokenized(tmp_path, made_of):
    data = made_of(of_texts())
    trainer = make(tmp_path, data, given={"eval_dataset": {"own": data}})
    assert tokens_in(trainer.train_dataset) == tokens_in(trainer.eval_dataset["own"]) == TOKENS
    trainer.train()
    assert trainer.evaluate()["eval_own_loss"] > 0


def test_columns(tmp_path):
    assert (
        tokens_in(make(tmp_path, of_texts("body"), dataset_text_field="body").train_dataset)
        == TOKENS
    )
    data = datasets.Dataset.from_dict({"input_ids": TOKENS, "text": TEXTS})
    assert make(tmp_path, data).train_dataset is data
    data = of_texts()  # a collator gets the data as they are
    assert (
        make(tmp_path, data, given={"data_collator": DataCollatorWithFlattening()}).train_dataset
        is data
    )


def test_a_model_is_loaded_by_its_name_and_as_is_asked_for(tmp_path):
    name = str(tmp_path / "model")
    small_model(implementation="sdpa").to(torch.bfloat16).save_pretrained(name)
    tokenizer().save_pretrained(name)
    trainer = make(tmp_path, of_texts(), name, {"processing_class": None})
    assert trainer.model.config._attn_implementation == "distca"
    assert {weight.dtype for weight in trainer.model.parameters()} == {torch.float32}
    assert tokens_in(trainer.train_dataset) == TOKENS
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "tokenizer.json").exists()
    (args,) = HfArgumentParser(DistCATrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--model_init_kwargs", '{"dtype": "bfloat16"}', "--use_cpu"]
    )
    asked = {"model_init_kwargs": args.model_init_kwargs}
    assert make(tmp_path, of_texts(), name, **asked).model.dtype == torch.bfloat16
    with refused(GIVEN[-1]):
        make(tmp_path, of_texts(), **asked)


def test_a_stream_without_a_tokenizer(tmp_path):
    tokens = Texts([{"input_ids": row} for row in TOKENS])
    make(tmp_path, tokens, given={"processing_class": None}).train()
    trainer = make(tmp_path, Texts([{"text": "w1"}]), given={"processing_class": None})
    with refused(Data.NO_TOKENIZER, name="document 0 of rank 0's share of train_dataset"):
        trainer.train()


# Other trainers


@dataclass
class ChatArguments(TrainingArguments):
    end_of_turn: int = field(default=2, metadata={"help": "The token behind every example."})


@dataclass
class PlannedChatArguments(DistCAArguments, ChatArguments):
    """Both trainers' arguments in one."""


class ChatTrainer(Trainer):
    """Names arguments in an order of its own, and puts a token behind every example."""

    def __init__(
        self, model: Any, args: ChatArguments, train_dataset: Any, data_collator: Any = None
    ) -> None:
        ended = train_dataset.map(lambda row: {"input_ids": [*row["input_ids"], args.end_of_turn]})
        super().__init__(model=model, args=args, data_collator=data_collator, train_dataset=ended)

    def get_train_dataloader(self) -> Any:
        return self._get_dataloader(
            self.train_dataset, "Training", self._train_batch_size, None, True
        )


class PlannedChatTrainer(DistCAMixin, ChatTrainer):
    """A chat trainer with planned attention."""


def test_arguments_are_of_both_trainers(tmp_path):
    arguments = partial(PlannedChatArguments, str(tmp_path), **OPTIONS)
    assert arguments().tokens_per_rank == 8192
    assert arguments(end_of_turn=5).end_of_turn == 5
    with pytest.raises(ValueError, match="tokens_per_rank must be positive"):
        arguments(tokens_per_rank=0)
    with refused(PACKED_ARGUMENTS[0]):
        arguments(label_smoothing_factor=0.1)
    # By position, too: the collator is seen there.
    data = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3]]})
    PlannedChatTrainer(
        small_model(), arguments(per_device_train_batch_size=4), data, DataCollatorWithFlattening()
    )
    with refused(WITHOUT_SETTINGS[0]):
        PlannedChatTrainer(
            small_model(), ChatArguments(output_dir=str(tmp_path), use_cpu=True), data
        )
    trainer = PlannedChatTrainer(small_model(), arguments(), data)
    (batch,) = trainer.get_train_dataloader()
    assert batch["input_ids"].tolist() in ([[1, 2, 2, 3, 2]], [[3, 2, 1, 2, 2]])
    trainer.train()
    with patch.object(trainer._loaders, "loader", wraps=trainer._loaders.loader) as made:
        trainer.get_train_dataloader()
    assert made.call_args.kwargs["shuffle"] is True


def test_arguments_by_name():
    def init(
        model: Any, args: Any = None, data_collator: Any = None, *, callbacks: Any = None
    ) -> None: ...

    assert arguments_by_name(init, (1, 2), {"callbacks": 3}) == {
        "model": 1,
        "args": 2,
        "callbacks": 3,
    }
    with pytest.raises(
        TypeError, match="takes 0 positional arguments, got 2; pass the others by name"
    ):
        arguments_by_name(lambda *args, **kwargs: None, (1, 2), {})
