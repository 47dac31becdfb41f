"""Activation checkpointing, whose names transformers has changed; its warnings of earlier names are
errors here.
"""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import hf_distca
from hf_distca.checks.setting_names import CHECKPOINTING, EARLIER, LATER
from hf_distca.models import checkpointing
from hf_distca.models.checkpointing import (
    checkpointing_options,
    disable_checkpointing,
    enable_checkpointing,
    is_checkpointing,
)
from tests.models_and_batches import small_model

OF_TRL = (
    "DistCASFTConfig",
    "DistCADPOConfig",
    "DistCAGRPOConfig",
    "DistCARLOOConfig",
    "DistCAKTOConfig",
)
QUIET = {"use_cpu": True, "bf16": False, "report_to": []}
renamed = pytest.mark.skipif(
    CHECKPOINTING == EARLIER, reason="this version of transformers has no other name"
)


def test_checkpoints_are_turned_on_and_off():
    model = small_model()
    enable_checkpointing(model, {"use_reentrant": False})
    assert is_checkpointing(model)
    disable_checkpointing(model)
    assert not is_checkpointing(model)


def test_names_of_earlier_versions(monkeypatch):
    monkeypatch.setattr(checkpointing, "CHECKPOINTING", EARLIER)
    model: Any = nn.Module()
    model.is_gradient_checkpointing = True
    calls = []
    model.gradient_checkpointing_enable = lambda *args, **options: calls.append((args, options))
    model.gradient_checkpointing_disable = lambda: calls.append("disabled")
    enable_checkpointing(model, {"use_reentrant": True}, every_n_layers=2)
    disable_checkpointing(model)
    assert calls == [(({"use_reentrant": True},), {"every_n_layers": 2}), "disabled"]
    assert is_checkpointing(model)
    args = SimpleNamespace(
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}
    )
    assert checkpointing_options(args) == {"use_reentrant": True}
    args.gradient_checkpointing_kwargs = None
    assert checkpointing_options(args) == {}
    args.gradient_checkpointing = False
    assert checkpointing_options(args) is None


@renamed
@pytest.mark.parametrize("name", OF_TRL)
def test_what_trl_turns_on_by_default_is_no_earlier_name(name, tmp_path):
    kind = getattr(hf_distca, name)
    assert getattr(kind(str(tmp_path), **QUIET), LATER) is True
    assert getattr(kind(str(tmp_path), **QUIET, **{LATER: False}), LATER) is False


@renamed
@pytest.mark.parametrize(
    ("name", "given"), [("DistCASFTConfig", False), ("DistCATrainingArguments", True)]
)
def test_an_earlier_name_that_a_user_gives_is_the_users(name, given, tmp_path):
    with pytest.warns(FutureWarning, match="`gradient_checkpointing` is deprecated"):
        args = getattr(hf_distca, name)(str(tmp_path), **QUIET, **{EARLIER: given})
    assert getattr(args, LATER) is given
