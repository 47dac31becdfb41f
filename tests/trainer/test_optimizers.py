"""What an optimizer does on small weights says whether it can step on shards of weights."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import DistributedType
from accelerate.utils import DummyOptim
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers.optimization import Adafactor

from hf_distca.trainer.optimizers import check_optimizer, why_not_on_shards

CPU = torch.device("cpu")
ROWS = "it keeps numbers for each row or column of a weight"
NUMBERS = "it keeps numbers that depend on whole weights"
OTHER = "its step on a shard of a weight is another one"


class Custom(torch.optim.Optimizer):
    """An optimizer that subtracts what `update` makes of a gradient and the state of its weight."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                update = self.update(parameter.grad, self.state[parameter], group)
                parameter.data.sub_(group["lr"] * update)

    def update(self, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> Any:
        return gradient


class OfNorm(Custom):
    """As LAMB does: the step has a norm that is the same for each weight."""

    def update(self, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> Any:
        return gradient / gradient.norm()


class Clips(Custom):
    """Divides a gradient that grows by a number of the whole weight, as StableAdamW does."""

    def update(self, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> Any:
        mean = state["mean"] = 0.5 * state.get("mean", gradient**2) + 0.5 * gradient**2
        return gradient / (gradient**2 / mean).mean().clamp(min=1.0)


class OfTheGroup(Custom):
    """As Prodigy does: a number of the group is found from all gradients, and has no effect in the
    first steps.
    """

    def update(self, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> Any:
        group["seen"] = group.get("seen", 0.0) + float(gradient.abs().sum())
        return gradient


class Preconditions(Custom):
    """As Shampoo does: a matrix of the columns, which has no effect in the first steps."""

    def update(self, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> Any:
        if gradient.dim() == 2:
            state["preconditioners"] = [gradient.T @ gradient]
        return gradient


class Blocks(Custom):
    """As optimizers of 8 bits do: each 256 numbers are rounded together."""

    def update(self, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> Any:
        blocks = nn.functional.pad(gradient.flatten(), (0, -gradient.numel() % 256)).view(-1, 256)
        state["absmax"] = scale = blocks.abs().amax(1, keepdim=True)
        rounded = (blocks / scale * 3).round() / 3 * scale
        return rounded.flatten()[: gradient.numel()].view_as(gradient)


class Undoes(Custom):
    """Adds a number of the whole weight in one step and subtracts it in the next step."""

    def update(self, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> Any:
        state["steps"] = state.get("steps", 0) + 1
        if state["steps"] % 2:
            state["kept"] = gradient.clone()
            return gradient + state["kept"].norm()
        return gradient - state["kept"].norm()


class Draws(Custom):
    """Draws random numbers."""

    def update(self, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> Any:
        return gradient + 1e-9 * torch.rand_like(gradient)


class Late(Custom):
    """Begins with the eleventh step."""

    def update(self, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> Any:
        state["steps"] = state.get("steps", 0) + 1
        return gradient * (state["steps"] > 10)


class Elsewhere(Custom):
    """As LOMO does: weights are updated in the backward pass."""

    def update(self, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> Any:
        return torch.zeros_like(gradient)


class OnlyOnFlat(Custom):
    """An optimizer that needs matrices, as GaLore does."""

    def update(self, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> Any:
        if gradient.dim() != 2:
            raise ValueError("no matrix\nat all")
        return gradient


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(6))]


OPTIMIZERS: list[tuple[Any, str]] = [
    *(
        (kind, "")
        for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RAdam, torch.optim.Adagrad)
    ),
    *((kind, "") for kind in (Custom, Blocks, Late)),
    *((kind, ROWS) for kind in (Adafactor, torch.optim.Adafactor, Preconditions)),
    *((kind, OTHER) for kind in (OfNorm, Clips, Undoes)),
    (OfTheGroup, NUMBERS),
    (Elsewhere, "its step changes no weight"),
    (OnlyOnFlat, "its step fails on a shard of a weight: ValueError: no matrix"),
    (torch.optim.LBFGS, "its step fails on a small weight: TypeError: LBFGS.step() missing"),
]


@pytest.mark.parametrize(
    ("kind", "expected"), OPTIMIZERS, ids=lambda value: getattr(value, "__name__", "")
)
def test_flat_shards(kind, expected):
    why = why_not_on_shards(kind(weights()), None, CPU)
    assert why.startswith(expected)
    assert bool(why) is bool(expected)


def test_the_optimizer_is_as_it_was():
    first, second = weights()
    groups = [{"params": [first], "lr": 0.5}, {"params": [], "lr": 0.3}, {"params": [second]}]
    optimizer = torch.optim.AdamW(groups, lr=0.7)
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # replaces the method `step`
    first.grad = torch.ones_like(first)
    optimizer.step()
    kept = optimizer.state_dict()
    random = torch.get_rng_state()
    state = {name: value.clone() for name, value in kept["state"][0].items()}
    before = first.detach().clone()
    attributes = dict(vars(optimizer))
    parameters = [g["params"] for g in optimizer.param_groups]
    assert why_not_on_shards(optimizer, None, CPU) == ""
    assert dict(vars(optimizer)) == attributes
    assert all(
        group["params"] is of_before
        for group, of_before in zip(optimizer.param_groups, parameters, strict=True)
    )
    assert optimizer.state_dict()["param_groups"] == kept["param_groups"]
    assert all(torch.equal(optimizer.state[first][name], value) for name, value in state.items())
    assert len(optimizer.state) == 1
    assert torch.equal(first, before)
    assert why_not_on_shards(Draws([first]), None, CPU) == ""
    assert torch.equal(torch.get_rng_state(), random)


def test_vectors_alone():
    """Adafactor divides a vector by a number of the whole vector."""
    assert why_not_on_shards(Adafactor([weights()[1]]), None, CPU) != ""
    assert why_not_on_shards(torch.optim.AdamW([weights()[1]]), None, CPU) == ""


def _on_dtensors() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    kinds = (
        torch.optim.AdamW,
        torch.optim.Muon,
        OfNorm,
        OfTheGroup,
        torch.optim.Adafactor,
        Adafactor,
    )
    return [why_not_on_shards(kind(weights()[:1]), mesh, CPU) for kind in kinds]


def test_shards_of_fsdp2(rank_pools):
    for reasons in rank_pools[2].run(_on_dtensors, keeps_groups=True):
        assert reasons[:3] == ["", "", ""]
        assert reasons[3] == NUMBERS
        assert all(why.startswith("its step fails on a shard of a weight: ") for why in reasons[4:])


def trainer_of(kind: str, optimizer: Any, config: dict[str, Any]) -> Any:
    """A trainer of a strategy, as far as the check reads it."""
    plugin = SimpleNamespace(hf_ds_config=SimpleNamespace(config=config, is_offload=lambda: False))
    accelerator = SimpleNamespace(
        is_fsdp2=False,
        distributed_type=DistributedType[kind],
        state=SimpleNamespace(deepspeed_plugin=plugin),
    )
    return SimpleNamespace(
        accelerator=accelerator,
        args=SimpleNamespace(device=CPU),
        model=nn.Linear(1, 1),
        optimizer=optimizer,
        is_deepspeed_enabled=kind == "DEEPSPEED",
    )


@pytest.mark.parametrize(
    ("kind", "named", "is_refused"),
    [
        ("DEEPSPEED", {"type": "Adafactor", "params": {"lr": "auto", "weight_decay": 0.5}}, True),
        ("DEEPSPEED", {"type": "SGD", "params": {"lr": 0.5}}, False),
        ("DEEPSPEED", {"type": "AdamW", "params": {"lr": "auto"}}, False),  # DeepSpeed's own
        ("DEEPSPEED", None, False),
    ],
)
def test_an_optimizer_of_a_deepspeed_configuration(kind, named, is_refused):
    trainer = trainer_of(kind, DummyOptim([]), {} if named is None else {"optimizer": named})
    with (
        pytest.raises(ValueError, match=f"{named['type']} is the optimizer")
        if is_refused
        else nullcontext()
    ):
        check_optimizer(trainer)


def test_strategies_with_flat_shards():
    """FSDP1 among them, which needs a GPU."""
    check_optimizer(trainer_of("MULTI_GPU", Adafactor(weights()), {}))


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED"])
def test_adafactor_with_flat_shards(kind):
    with pytest.raises(ValueError, match="Adafactor is the optimizer where a rank has shards"):
        check_optimizer(trainer_of(kind, Adafactor(weights()), {}))
    check_optimizer(trainer_of(kind, torch.optim.AdamW(weights()), {}))
