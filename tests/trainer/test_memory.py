"""What a trainer logs about memory."""

import logging

import peft
import pytest

from hf_distca.trainer.memory import checkpointing_of, log_memory, strategy_of
from tests.models_and_batches import small_model
from tests.trainer.small_trainers import make_trainer


def logged(caplog, trainer, memory) -> tuple[str, list[str]]:
    with caplog.at_level(logging.INFO, "hf_distca.trainer.memory"):
        log_memory(trainer.model, trainer.dispatcher, trainer.args, trainer.accelerator, memory)
    records = [record for record in caplog.records if record.name == "hf_distca.trainer.memory"]
    (first, *rest) = records
    assert all(record.levelname == "WARNING" for record in rest)
    return first.getMessage(), [record.getMessage() for record in rest]


def test_memory_is_logged_with_a_warning_if_it_does_not_fit(tmp_path, caplog):
    model = small_model(hidden_size=64, intermediate_size=8192)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    arguments = {"tokens_per_rank": 8192, "activation_checkpointing": True, "bf16": True}
    trainer = make_trainer(str(tmp_path), model=model, max_steps=1, save_strategy="no", **arguments)
    message, warnings = logged(caplog, trainer, 10**10)
    assert message.startswith("memory with 8192 tokens on each rank: ")
    assert " of 10.0 GB (" in message
    assert not warnings
    caplog.clear()
    _, (warning,) = logged(caplog, trainer, 10**8)
    assert warning.startswith("tokens_per_rank=8192 will not fit: ")
    # The model is as it was.
    assert not model.is_gradient_checkpointing
    assert next(model.parameters()).grad is None
    trainer.train()


@pytest.mark.parametrize(("given", "expected"), [({}, None), ({"every_n_layers": 2}, {"every_n_layers": 2})])
def test_how_layers_are_checkpointed(tmp_path, given, expected):
    trainer = make_trainer(
        str(tmp_path), gradient_checkpointing=bool(given), gradient_checkpointing_kwargs=given or None
    )
    assert checkpointing_of(trainer.args, trainer.accelerator) == expected
    assert strategy_of(trainer.accelerator, trainer.model) == "ddp"
