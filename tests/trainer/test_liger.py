"""use_liger_kernel in one process; tests/trainer/test_features.py has it on two ranks."""

import pytest

from tests.trainer import liger
from tests.trainer.small_trainers import make_trainer

ARGUMENTS = {
    "max_steps": 2,
    "save_strategy": "no",
    "optim": "sgd",
    "learning_rate": 0.3,
    "loss_chunk_bytes": 4 * 64 * 20,
}


def trainer_of(folder, **arguments):
    return make_trainer(str(folder), **{**ARGUMENTS, **arguments})


def test_evaluation_makes_no_logits_either(tmp_path, monkeypatch):
    liger.install(monkeypatch)
    trainer = trainer_of(tmp_path, use_liger_kernel=True)
    assert trainer.args.liger_kernel_config == {"fused_linear_cross_entropy": False, "cross_entropy": False}
    trainer.train()
    norm = trainer.model.model.norm
    assert vars(norm)["forward"].__func__ is liger._norm
    assert "forward" not in vars(trainer.model)
    loss = trainer.evaluate()["eval_loss"]
    trainer.args.use_liger_kernel = False  # which asks models for no logits in evaluations
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-6)


def test_kernels_that_are_not_wanted(tmp_path, monkeypatch):
    liger.install(monkeypatch)
    wanted = {"swiglu": False, "geglu": False, "rms_norm": False}
    trainer = trainer_of(tmp_path, use_liger_kernel=True, liger_kernel_config=wanted, mlp_chunk_rows=16)
    trainer.train()
    assert all("forward" not in vars(module) for module in trainer.model.modules())
