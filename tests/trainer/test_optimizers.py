"""Optimizers of whole weights are refused where a rank has shards of weights; others are accepted.

`tests/trainer/test_features.py` trains some of them under each strategy.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import DistributedType
from accelerate.utils import DummyOptim
from torch import nn
from transformers.optimization import Adafactor

from hf_distca.checks.run_rules import Run
from hf_distca.trainer.launch_facts import check_optimizer
from tests.refused import refused


class AdamW(torch.optim.AdamW):
    """As GaLore's, whose class has no name of its own."""

    __module__ = "galore_torch.adamw"


class GrokAdamW(torch.optim.AdamW):
    """Has one norm for a whole weight."""


class MyAdafactor(torch.optim.Adafactor):
    """A subclass of one that is known."""


class Unknown(torch.optim.SGD):
    """An optimizer of nobody."""


def trainer_of(strategy: str, optimizer: Any, config: dict[str, Any] | None = None) -> Any:
    """A trainer of a strategy, as far as the check reads it."""
    plugin = SimpleNamespace(hf_ds_config=SimpleNamespace(get_value=(config or {}).get))
    accelerator = SimpleNamespace(
        is_fsdp2=strategy == "FSDP2",
        distributed_type=DistributedType[strategy.removesuffix("2")],
        state=SimpleNamespace(deepspeed_plugin=plugin),
    )
    return SimpleNamespace(
        accelerator=accelerator,
        model=nn.Linear(1, 1),
        optimizer=optimizer,
        is_deepspeed_enabled=strategy == "DEEPSPEED",
    )


SHARDED = ("FSDP2", "FSDP", "DEEPSPEED")
FLAT = SHARDED[1:]


@pytest.mark.parametrize(
    ("kind", "refused_under"),
    [
        (torch.optim.AdamW, ()),
        (Unknown, ()),
        (torch.optim.Adafactor, SHARDED),
        (MyAdafactor, SHARDED),
        (Adafactor, SHARDED),
        (torch.optim.Muon, FLAT),
        (AdamW, FLAT),
        (GrokAdamW, FLAT),
    ],
)
@pytest.mark.parametrize("strategy", [*SHARDED, "MULTI_GPU"])
def test_optimizers(kind, refused_under, strategy):
    trainer = trainer_of(strategy, kind([nn.Parameter(torch.ones(4, 6))]))
    if strategy not in refused_under:
        return check_optimizer(trainer)
    with refused(Run.NEEDS_WHOLE_WEIGHTS, optimizer=f"{kind.__module__}.{kind.__name__}"):
        check_optimizer(trainer)


def test_a_model_that_transformers_has_divided(monkeypatch):
    monkeypatch.setattr("hf_distca.trainer.launch_facts.is_divided_at_load", lambda model: True)
    with refused(Run.NEEDS_WHOLE_WEIGHTS):
        check_optimizer(trainer_of("MULTI_GPU", Adafactor([nn.Parameter(torch.ones(4, 6))])))


def test_an_optimizer_that_the_configuration_of_deepspeed_names():
    def named(name: str) -> Any:
        return trainer_of("DEEPSPEED", DummyOptim([]), {"optimizer.type": name})

    check_optimizer(named("AdamW"))
    check_optimizer(named("Muon"))  # DeepSpeed's own, which knows shards
    with refused(Run.NEEDS_WHOLE_WEIGHTS, optimizer="Adafactor"):
        check_optimizer(named("Adafactor"))
