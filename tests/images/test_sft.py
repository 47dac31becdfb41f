"""TRL's SFTTrainer on chats with pictures, and DistCASFTTrainer on the same."""

from typing import Any

import pytest
import trl
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import hf_distca
from hf_distca.checks.setting_names import CHECKPOINTING
from tests.images.families import tiny_model
from tests.images.pictures import chats, processor, prompts
from tests.trainer.comparison import QUIET, launched

COUNTS = [2, 0, 3, 1, 1]
"""Numbers of pictures of the documents."""
DATA = {
    "chats": (chats, {}),
    "answers of chats": (chats, {"assistant_only_loss": True}),
    "completions": (prompts, {}),
}
ARGUMENTS: dict[str, Any] = {
    **QUIET,
    "max_steps": 3,
    "optim": "sgd",
    "learning_rate": 0.05,
    "bf16": False,
    "per_device_train_batch_size": len(COUNTS),
    "max_length": None,
    CHECKPOINTING: True,
}
FOLLOWED = ("loss", "grad_norm", "entropy", "mean_token_accuracy")


def train(folder: str, data: str, planned: bool) -> tuple[list[list[float]], dict[str, Any]]:
    """What a training logs at each step, and its weights."""
    make, arguments = DATA[data]
    with launched("ddp", {}):
        unset_hf_deepspeed_config()
        given: dict[str, Any] = {"processing_class": processor(), "train_dataset": make(COUNTS)}
        if planned:
            args: Any = hf_distca.DistCASFTConfig(
                folder, **ARGUMENTS, **arguments, tokens_per_rank=200, document_layout="fixed"
            )
            model = tiny_model("qwen3_vl", "distca")
            trainer: Any = hf_distca.DistCASFTTrainer(model, args, **given)
        else:
            args = trl.SFTConfig(folder, **ARGUMENTS, **arguments, use_cpu=True)
            trainer = trl.SFTTrainer(tiny_model("qwen3_vl", "sdpa"), args, **given)
        trainer.train()
        trainer.evaluate({"others": make(COUNTS)})
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        weights = {name: weight.detach() for name, weight in trainer.model.named_parameters()}
        evaluated = trainer.state.log_history[-1]["eval_others_loss"]
    followed = [[float(entry[name]) for name in FOLLOWED] for entry in logs]
    return [*followed, [evaluated]], weights


@pytest.mark.parametrize("data", DATA)
def test_as_trl_trains(rank_pools, tmp_path, data):
    expected, weights = rank_pools[1].run(train, str(tmp_path / "trl"), data, False)[0]
    for logs, found in rank_pools[2].run(train, str(tmp_path / "planned"), data, True):
        for step, expected_step in zip(logs, expected, strict=True):
            assert step == pytest.approx(expected_step, rel=1e-4, abs=1e-4)
        for name, weight in weights.items():
            error = (found[name] - weight).abs().max() / weight.abs().max().clamp(min=0.05)
            assert error < 1e-5, (name, error)
