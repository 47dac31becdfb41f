"""PEFT adapters: trained on two ranks as in one process, or refused."""

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch

from tests.models_and_batches import random_documents, reference_step, small_model
from tests.trainer.small_trainers import LENGTHS, make_trainer

LEARNING_RATE, STEPS = 0.3, 3
CAUSAL_LM = {"task_type": "CAUSAL_LM"}
TRAINED: dict[str, Callable[[], peft.PeftConfig]] = {
    "lora": lambda: peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj"],
        modules_to_save=["lm_head"],
        trainable_token_indices=[3, 4],
        **CAUSAL_LM,
    ),
    "dora": lambda: peft.LoraConfig(r=4, target_modules=["k_proj", "o_proj"], use_dora=True, **CAUSAL_LM),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], **CAUSAL_LM
    ),
    "oft": lambda: peft.OFTConfig(r=0, oft_block_size=4, target_modules=["q_proj", "v_proj"], **CAUSAL_LM),
    "adaption_prompt": lambda: peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, **CAUSAL_LM),
}
VIRTUAL_TOKENS = "puts virtual tokens before the rows"
REFUSED: dict[str, tuple[Callable[[], peft.PeftConfig], str]] = {
    "prompt": (lambda: peft.PromptTuningConfig(num_virtual_tokens=4, **CAUSAL_LM), VIRTUAL_TOKENS),
    "prefix": (lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, **CAUSAL_LM), VIRTUAL_TOKENS),
    "p_tuning": (
        lambda: peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=16, **CAUSAL_LM),
        VIRTUAL_TOKENS,
    ),
    "alora": (
        lambda: peft.LoraConfig(r=4, target_modules=["q_proj"], alora_invocation_tokens=[5], **CAUSAL_LM),
        "behind the last invocation tokens",
    ),
    "adalora": (lambda: peft.AdaLoraConfig(total_step=10, target_modules=["q_proj"], **CAUSAL_LM), "adds a penalty"),
    "poly": (lambda: peft.PolyConfig(r=4, target_modules=["q_proj"], **CAUSAL_LM), "needs task_ids"),
    "lily": (lambda: peft.LilyConfig(r=4, target_modules=["q_proj"], **CAUSAL_LM), "averages its routers"),
    "shadow": (lambda: peft.ShadowConfig(shadow_num_hidden_layers=1, **CAUSAL_LM), "the loss of a second decoder"),
}

NEWER = {"lily": "LilyConfig", "shadow": "ShadowConfig"}
"""Kinds that the oldest peft that may be installed does not have."""


def adapted(config: peft.PeftConfig, implementation: str) -> Any:
    model = small_model(implementation=implementation)
    torch.manual_seed(0)
    return peft.get_peft_model(model, config)


def trainable(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().clone() for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def trained(folder: str, kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    trainer = make_trainer(
        folder,
        model=adapted(TRAINED[kind](), "distca"),
        max_steps=STEPS,
        gradient_accumulation_steps=8,
        learning_rate=LEARNING_RATE,
        optim="sgd",
        max_grad_norm=0.0,
        save_strategy="no",
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainable(trainer.model)


@pytest.mark.parametrize("kind", TRAINED)
def test_an_adapter_trains_as_in_one_process(rank_pools, tmp_path, kind):
    model = adapted(TRAINED[kind](), "sdpa").train()
    before = trainable(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    expected = []
    for _ in range(STEPS):
        loss, _ = reference_step(model, random_documents(LENGTHS))
        expected.append(loss)
        optimizer.step()
    after = trainable(model)
    for losses, parameters in rank_pools[2].run(trained, str(tmp_path), kind):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert parameters.keys() == after.keys()
        for name, parameter in parameters.items():
            # What was learned, not what was there before.
            torch.testing.assert_close(parameter - before[name], after[name] - before[name], rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("kind", REFUSED)
def test_an_adapter_that_would_be_wrong_is_refused(tmp_path, kind):
    config, message = REFUSED[kind]
    if kind in NEWER and not hasattr(peft, NEWER[kind]):
        pytest.skip(f"peft {peft.__version__} has no {NEWER[kind]}")
    with pytest.raises(ValueError, match=message):
        make_trainer(str(tmp_path), model=adapted(config(), "distca"))
