"""What trainers are given: text and model names; arguments of other trainers that DistCAMixin is put before."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import accelerate
import datasets
import pytest
import torch
import trl
from transformers import DataCollatorWithFlattening, HfArgumentParser, Trainer, TrainingArguments

from hf_distca import DistCAArguments, DistCAMixin, DistCATrainer, DistCATrainingArguments
from hf_distca.collator.refusals import Data
from hf_distca.trainer.refusals import ARGUMENTS, GIVEN, LOADED_ALREADY, by_name
from tests.models_and_batches import small_model
from tests.refused import refused
from tests.trainer.chats import chats, prompts, tokenizer

TEXTS = ["w1 w2 w3", "w4 [end]", "w5", "w6 w7 w8 w9"]
TOKENS = [[6, 7, 8, 2], [9, 2], [10, 2], [11, 12, 13, 14, 2]]
OPTIONS: dict[str, Any] = {
    **{"use_cpu": True, "report_to": [], "disable_tqdm": True, "dataloader_num_workers": 0},
    **{"max_steps": 1, "save_strategy": "no"},
}


@pytest.fixture
def make(tmp_path, monkeypatch) -> Callable[..., DistCATrainer]:
    """Make a trainer of data, with other arguments of its own by name, and options."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def trainer(data: Any, model: Any = None, **given: Any) -> DistCATrainer:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        names = ("eval_dataset", "data_collator", "processing_class")
        of_trainer = {name: given.pop(name) for name in names if name in given}
        args = DistCATrainingArguments(str(tmp_path), tokens_per_rank=16, **OPTIONS, **given)
        return DistCATrainer(
            model or small_model(), args, train_dataset=data, **{"processing_class": tokenizer(), **of_trainer}
        )

    return trainer


def of_texts(column: str = "text") -> datasets.Dataset:
    return datasets.Dataset.from_list([{column: text, "source": number} for number, text in enumerate(TEXTS)])


def tokens_in(dataset: Any) -> list[list[int]]:
    assert all(row.keys() == {"input_ids"} for row in dataset)
    return [row["input_ids"] for row in dataset]


@pytest.mark.parametrize("made_of", [datasets.Dataset.flatten, list, datasets.Dataset.to_iterable_dataset])
def test_text_is_tokenized(make, made_of):
    data = made_of(of_texts())
    trainer = make(data, eval_dataset={"own": data})
    assert tokens_in(trainer.train_dataset) == tokens_in(trainer.eval_dataset["own"]) == TOKENS
    trainer.train()
    assert trainer.evaluate()["eval_own_loss"] > 0


def test_tokens_are_those_of_trl(tmp_path):
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    args = trl.SFTConfig(str(tmp_path), bf16=False, max_length=None, **OPTIONS)
    model = small_model("llama", "sdpa")
    theirs = trl.SFTTrainer(model=model, args=args, train_dataset=of_texts(), processing_class=tokenizer())
    assert list(theirs.train_dataset["input_ids"]) == TOKENS


def test_columns(make):
    assert tokens_in(make(of_texts("body"), dataset_text_field="body").train_dataset) == TOKENS
    data = datasets.Dataset.from_dict({"input_ids": TOKENS, "text": TEXTS})
    assert make(data).train_dataset is data
    data = of_texts()  # a collator gets the data as they are
    assert make(data, data_collator=DataCollatorWithFlattening()).train_dataset is data


def test_a_model_is_loaded_by_its_name_and_as_is_asked_for(make, tmp_path):
    name = str(tmp_path / "model")
    small_model(implementation="sdpa").to(torch.bfloat16).save_pretrained(name)
    tokenizer().save_pretrained(name)
    trainer = make(of_texts(), name, processing_class=None)
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
    assert {weight.dtype for weight in make(of_texts(), name, **asked).model.parameters()} == {torch.bfloat16}
    with refused(LOADED_ALREADY):
        make(of_texts(), **asked)


def test_what_gives_no_tokens_is_refused_in_the_constructor(make):
    tokens = datasets.Dataset.from_dict({"input_ids": TOKENS})
    for entry, data, given, values in (
        (Data.NO_TOKENIZER, of_texts(), {"processing_class": None}, {"name": "train_dataset"}),
        (Data.NO_TEXT, of_texts("body"), {}, {"columns": ["body", "source"], "field": "text"}),
        (Data.NO_TEXT, [{"text": 3}], {}, {"field": "text"}),
        (Data.CHATS, prompts(1), {}, {"columns": "'prompt', 'completion'"}),
        (Data.CHATS, tokens, {"eval_dataset": {"own": chats(1)}}, {"name": "eval_dataset['own']"}),
    ):
        with refused(entry, **values):
            make(data, **given)


# Other trainers


@dataclass
class ChatArguments(TrainingArguments):
    end_of_turn: int = field(default=2, metadata={"help": "The token behind every example."})


@dataclass
class PlannedChatArguments(DistCAArguments, ChatArguments):
    """Both trainers' arguments in one."""


class ChatTrainer(Trainer):
    """Names arguments in an order of its own, and puts a token behind every example."""

    def __init__(self, model: Any, args: ChatArguments, train_dataset: Any, data_collator: Any = None) -> None:
        ended = train_dataset.map(lambda row: {"input_ids": [*row["input_ids"], args.end_of_turn]})
        super().__init__(model=model, args=args, data_collator=data_collator, train_dataset=ended)


class PlannedChatTrainer(DistCAMixin, ChatTrainer):
    """A chat trainer with planned attention."""


class Opaque(Trainer):
    """Takes arguments without names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class PlannedOpaque(DistCAMixin, Opaque):
    """Behind a trainer whose arguments have no names."""


def test_arguments_are_of_both_trainers():
    arguments = PlannedChatArguments("out", use_cpu=True, end_of_turn=5)
    assert (arguments.tokens_per_rank, arguments.dataloader_num_workers, arguments.end_of_turn) == (8192, 1, 5)
    with pytest.raises(ValueError, match="tokens_per_rank must be positive"):
        PlannedChatArguments("out", use_cpu=True, tokens_per_rank=0)
    with refused(ARGUMENTS[3]):
        PlannedChatArguments("out", use_cpu=True, dataloader_drop_last=True)


def test_arguments_by_position(tmp_path):
    def init(model: Any, args: Any = None, data_collator: Any = None, *, callbacks: Any = None) -> None: ...

    assert by_name(init, (1, 2), {"callbacks": 3}) == {"model": 1, "args": 2, "callbacks": 3}
    data = datasets.Dataset.from_dict({"input_ids": [[1, 2]]})
    arguments = PlannedChatArguments(str(tmp_path), **OPTIONS, per_device_train_batch_size=4)
    # The collator is seen by position too: without one the batch size would be refused.
    PlannedChatTrainer(small_model(), arguments, data, DataCollatorWithFlattening())
    with pytest.raises(TypeError, match="takes 0 positional arguments, got 2; pass the others by name"):
        PlannedOpaque(small_model(), arguments)
    with refused(GIVEN[1]):
        PlannedChatTrainer(small_model(), ChatArguments(output_dir=str(tmp_path), use_cpu=True), data)
    trainer = PlannedChatTrainer(small_model(), PlannedChatArguments(str(tmp_path), **OPTIONS), data)
    (batch,) = trainer.get_train_dataloader()
    assert batch["input_ids"].tolist() == [[1, 2, 2]]
    trainer.train()
