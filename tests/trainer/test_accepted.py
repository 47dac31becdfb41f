"""What asks for what is done anyway is accepted, and one line says so."""

from functools import partial
from typing import Any

import pytest
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DefaultDataCollator,
    default_data_collator,
)

import hf_distca
from tests.models_and_batches import small_model
from tests.trainer.chats import chats, tokenizer
from tests.trainer.comparison import CHECKPOINTING
from tests.trainer.small_trainers import make_trainer

PACKED = "Documents are packed by length: a rank trains on up to tokens_per_rank="


def lines(capsys: Any) -> list[str]:
    """What was printed of arguments without an effect."""
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith(PACKED)]


def chat_arguments(folder: Any, **arguments: Any) -> Any:
    quiet = {"use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True, "max_steps": 1}
    return hf_distca.DistCASFTConfig(str(folder), **quiet, **arguments)


def test_arguments_of_batches_have_no_effect(tmp_path, capsys):
    make_trainer(str(tmp_path))
    assert lines(capsys) == []
    make_trainer(
        str(tmp_path),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=8,
        train_sampling_strategy="group_by_length",
        dataloader_drop_last=True,
        dataloader_in_order=False,
        accelerator_config={"split_batches": True, "even_batches": False},
        max_steps=2,
        save_strategy="no",
    ).train()
    (line,) = lines(capsys)
    assert line == (
        f"{PACKED}160 tokens at a time. No effect: per_device_train_batch_size=4, "
        "per_device_eval_batch_size=8, train_sampling_strategy='group_by_length', "
        "dataloader_drop_last=True, dataloader_in_order=False, "
        "accelerator_config.split_batches=True, accelerator_config.even_batches=False"
    )


@pytest.mark.parametrize(
    ("collator", "name"),
    [
        (lambda: DataCollatorForLanguageModeling(tokenizer(), mlm=False), None),
        (lambda: DataCollatorForSeq2Seq(tokenizer()), None),
        (DefaultDataCollator, None),
        (lambda: default_data_collator, "default_data_collator"),
    ],
)
def test_collators_that_give_each_document_a_row(tmp_path, capsys, collator, name):
    collator = collator()
    documents = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]
    given = {"train_dataset": documents, "data_collator": collator}
    trainer = make_trainer(str(tmp_path), given=given)
    (batch,) = trainer.get_train_dataloader()
    assert batch["input_ids"].shape == (1, 5)
    assert lines(capsys) == [
        f"{PACKED}160 tokens at a time. No effect: data_collator={name or type(collator).__name__}"
    ]


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")  # of TRL itself
def test_arguments_of_trl(tmp_path, capsys):
    args = chat_arguments(
        tmp_path,
        packing=True,
        eval_packing=False,
        padding_free=True,
        pad_to_multiple_of=8,
        per_device_train_batch_size=4,
        max_length=64,
        activation_offloading=True,
        **{f"{CHECKPOINTING}_kwargs": {"selective": True, "use_reentrant": False}},
    )
    assert args.tokens_per_rank == 256
    assert args.offload_activations is True
    assert getattr(args, f"{CHECKPOINTING}_kwargs") == {"use_reentrant": False}
    trainer = hf_distca.DistCASFTTrainer(
        small_model(), args, train_dataset=chats(), processing_class=tokenizer()
    )
    assert len(trainer.train_dataset) == 12  # chats, and not the rows of TRL
    trainer.train()
    (line,) = lines(capsys)
    assert line == (
        f"{PACKED}256 tokens at a time. No effect: packing=True, eval_packing=False, "
        "padding_free=True, pad_to_multiple_of=8, "
        "activation_offloading=True (offload_activations=True), per_device_train_batch_size=4"
    )


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [
        ({}, 8192),
        ({"per_device_train_batch_size": 4}, 8192),
        ({"max_length": 512}, 8192),
        ({"per_device_train_batch_size": 4, "max_length": 512}, 2048),
        ({"per_device_train_batch_size": 4, "max_length": 512, "tokens_per_rank": "8k"}, 8192),
    ],
)
def test_the_tokens_of_a_batch_of_trl(tmp_path, arguments, tokens):
    assert chat_arguments(tmp_path, **arguments).tokens_per_rank == tokens


@pytest.mark.parametrize("by_name", [False, True])
def test_another_attention_is_replaced(tmp_path, by_name):
    model: Any = small_model(implementation="eager")
    options = {}
    if by_name:
        model.save_pretrained(tmp_path / "model")
        model = str(tmp_path / "model")
        options = {"model_init_kwargs": {"attn_implementation": "flash_attention_2"}}
    make = partial(make_trainer, str(tmp_path), model=model, max_steps=1, save_strategy="no")
    trainer = make(**options)
    assert trainer.model.config._attn_implementation == "distca"
    trainer.train()
