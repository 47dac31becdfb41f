"""Text and model names given to DistCATrainer: tokens as TRL makes them, and what is refused in the constructor."""

import os
from typing import Any

import accelerate
import datasets
import pytest
import torch
import trl
from transformers import DataCollatorWithFlattening, HfArgumentParser

from hf_distca import DistCATrainer, DistCATrainingArguments
from hf_distca.collator.refusals import Data
from hf_distca.trainer.refusals import LOADED_ALREADY
from tests.models_and_batches import small_model
from tests.refused import refused
from tests.trainer.chats import chats, prompts, tokenizer

TEXTS = ["w1 w2 w3", "w4 [end]", "w5", "w6 w7 w8 w9"]
TOKENS = [[6, 7, 8, 2], [9, 2], [10, 2], [11, 12, 13, 14, 2]]
ARGUMENTS = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "dataloader_num_workers": 0, "max_steps": 1}


def trainer_of(folder: Any, data: Any, model: Any = None, **changes: Any) -> DistCATrainer:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    of_trainer = {name: changes.pop(name) for name in ("eval_dataset", "data_collator") if name in changes}
    processing_class = changes.pop("processing_class", tokenizer())
    args = DistCATrainingArguments(str(folder), tokens_per_rank=16, save_strategy="no", **ARGUMENTS, **changes)
    return DistCATrainer(
        model=model or small_model(),
        args=args,
        train_dataset=data,
        processing_class=processing_class,
        **of_trainer,
    )


def of_texts(kind: str, field: str = "text") -> Any:
    rows = [{field: text, "source": number} for number, text in enumerate(TEXTS)]
    if kind == "list":
        return rows
    if kind == "stream":
        return datasets.Dataset.from_list(rows).to_iterable_dataset()
    return datasets.Dataset.from_list(rows)


@pytest.mark.parametrize("kind", ["stored", "list", "stream"])
def test_text_is_tokenized(tmp_path, kind):
    trainer = trainer_of(tmp_path, of_texts(kind), eval_dataset={"own": of_texts(kind)})
    assert list(trainer.train_dataset) == [{"input_ids": tokens} for tokens in TOKENS]
    assert list(trainer.eval_dataset["own"]) == list(trainer.train_dataset)
    trainer.train()
    assert trainer.evaluate()["eval_own_loss"] > 0


def test_tokens_are_those_of_trl(tmp_path):
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    args = trl.SFTConfig(str(tmp_path), bf16=False, max_length=None, **ARGUMENTS)
    model = small_model("llama", "sdpa")
    theirs = trl.SFTTrainer(model=model, args=args, train_dataset=of_texts("stored"), processing_class=tokenizer())
    assert list(theirs.train_dataset["input_ids"]) == TOKENS


def test_columns(tmp_path):
    trainer = trainer_of(tmp_path, of_texts("stored", "body"), dataset_text_field="body")
    assert list(trainer.train_dataset["input_ids"]) == TOKENS
    data = datasets.Dataset.from_dict({"input_ids": TOKENS, "text": TEXTS})
    assert trainer_of(tmp_path, data).train_dataset is data
    data = of_texts("stored")  # a collator gets the data as they are
    assert trainer_of(tmp_path, data, data_collator=DataCollatorWithFlattening()).train_dataset is data


def test_a_model_is_loaded_by_its_name(tmp_path):
    model = small_model(implementation="sdpa").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    trainer = trainer_of(tmp_path, of_texts("stored"), str(tmp_path / "model"), processing_class=None)
    assert trainer.model.config._attn_implementation == "distca"
    assert {weight.dtype for weight in trainer.model.parameters()} == {torch.float32}
    assert list(trainer.train_dataset["input_ids"]) == TOKENS
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "tokenizer.json").exists()


def test_a_model_is_loaded_as_is_asked_for(tmp_path):
    small_model(implementation="sdpa").save_pretrained(tmp_path / "model")
    (args,) = HfArgumentParser(DistCATrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--model_init_kwargs", '{"dtype": "bfloat16"}', "--use_cpu"]
    )
    data = datasets.Dataset.from_dict({"input_ids": TOKENS})
    trainer = trainer_of(tmp_path, data, str(tmp_path / "model"), model_init_kwargs=args.model_init_kwargs)
    assert {weight.dtype for weight in trainer.model.parameters()} == {torch.bfloat16}
    with refused(LOADED_ALREADY):
        trainer_of(tmp_path, data, model_init_kwargs={"dtype": "bfloat16"})


@pytest.mark.parametrize(
    ("entry", "data", "changes", "values"),
    [
        (Data.NO_TOKENIZER, of_texts("stored"), {"processing_class": None}, {"name": "train_dataset"}),
        (Data.NO_TEXT, of_texts("stored", "body"), {}, {"columns": ["body", "source"], "field": "text"}),
        (Data.NO_TEXT, [{"text": 3}], {}, {"field": "text"}),
        (Data.CHATS, prompts(1), {}, {"columns": "'prompt', 'completion'"}),
        (
            Data.CHATS,
            datasets.Dataset.from_dict({"input_ids": TOKENS}),
            {"eval_dataset": {"own": chats(1)}},
            {"name": "eval_dataset['own']", "columns": "'messages'"},
        ),
    ],
)
def test_what_gives_no_tokens_is_refused_in_the_constructor(tmp_path, entry, data, changes, values):
    with refused(entry, **values):
        trainer_of(tmp_path, data, **changes)
