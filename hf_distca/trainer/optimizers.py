"""Find out whether an optimizer steps on shards of weights as on whole weights.

It takes some steps on small weights, once as a whole and once in shards.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from accelerate import DistributedType
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer
from transformers import Trainer

from hf_distca.models.tensor_parallel import is_divided_at_load
from hf_distca.trainer.refusals import Run

ROWS = 131
"""Rows of a small weight: a prime that no state has by chance, above the sizes from which
optimizers use rows."""
COLUMNS = 137
"""Columns of a small weight, likewise."""
FLAT_CUT = 2**13
"""Numbers in the first flat shard.

It ends within a row, and between two blocks of an optimizer of 8 bits.
"""
STEPS = 12
"""Number of steps; some optimizers change no weight in the first ones."""
LEARNING_RATE = 0.1
"""Learning rate of the steps, in place of the optimizer's own: large enough to change weights."""
TOLERANCE = 0.03
"""Allowed difference of a weight on shards, relative to its change: Muon multiplies matrices in
bfloat16."""

Place = Callable[[Tensor], Tensor]
"""What makes of a small weight the part or the DTensor that the optimizer gets."""


def check_optimizer(trainer: Trainer) -> None:
    """Raise ValueError if a rank has shards of weights and the optimizer needs whole weights.

    A collective call.
    """
    accelerator = trainer.accelerator
    device = trainer.args.device
    mesh = None
    optimizer: Any = trainer.optimizer
    if trainer.is_deepspeed_enabled:
        config = accelerator.state.deepspeed_plugin.hf_ds_config
        if config.is_offload():
            device = torch.device("cpu")
        if not isinstance(optimizer, Optimizer):
            optimizer = optimizer_named_in(config.config)
    # An earlier training has prepared its optimizer.
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, AcceleratedOptimizer):
        return
    if accelerator.is_fsdp2 or is_divided_at_load(trainer.model):
        mesh = init_device_mesh(device.type, (trainer.args.world_size,))
    elif accelerator.distributed_type not in (DistributedType.DEEPSPEED, DistributedType.FSDP):
        return
    reason = why_not_on_shards(optimizer, mesh, device)
    if reason:
        raise Run.NEEDS_WHOLE_WEIGHTS.error(optimizer=type(optimizer).__name__, why=reason)


def optimizer_named_in(config: Mapping[str, Any]) -> Optimizer | None:
    """Return the optimizer of torch that DeepSpeed's configuration names, for one small weight.

    None where the configuration names no optimizer, or one of DeepSpeed's own, which know shards.
    """
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    section = config.get("optimizer")
    if section is None or section["type"].lower() in DEEPSPEED_OPTIMIZERS:
        return None
    options = {name: value for name, value in section.get("params", {}).items() if value != "auto"}
    make_optimizer: Any = getattr(torch.optim, section["type"])
    optimizer: Optimizer = make_optimizer([nn.Parameter(torch.zeros(1, 1))], **options)
    return optimizer


def why_not_on_shards(optimizer: Optimizer, mesh: DeviceMesh | None, device: torch.device) -> str:
    """Return why an optimizer steps otherwise on shards than on whole weights; "" if alike.

    The optimizer makes some steps on small weights, once whole and once as shards. A collective
    of `mesh`.

    Args:
        mesh: Ranks among which FSDP2 divides the rows of weights, as DTensors. None stands for flat
            shards, of ZeRO and of FSDP1.
    """
    # 1. Steps on whole weights. FSDP2 divides rows evenly only where their number allows it.
    rows = ROWS if mesh is None else math.ceil(ROWS / mesh.size()) * mesh.size()
    groups = [group for group in optimizer.param_groups if group["params"]]
    shapes = [(rows, COLUMNS) if _has_matrix(group) else (rows * COLUMNS,) for group in groups]
    whole_trial = _Trial(optimizer, shapes, device, lambda weight: weight)
    if whole_trial.error:
        return f"its step fails on a small weight: {whole_trial.error}"
    if torch.equal(whole_trial.weights[0], whole_trial.weights[-1]):
        return "its step changes no weight"
    if mesh is None and whole_trial.holds_rows_or_columns:
        return "it keeps numbers for each row or column of a weight"
    # 2. Steps on shards, and what the optimizer keeps for them.
    shard_trials = [_Trial(optimizer, shapes, device, place) for place in _shard_places(mesh)]
    for trial in shard_trials:
        if trial.error:
            return f"its step fails on a shard of a weight: {trial.error}"
        if not _all_close(trial.numbers, whole_trial.numbers):
            return "it keeps numbers that depend on whole weights"
    # 3. Compare the weights after each step.
    for step in range(1, STEPS + 1):
        weights = torch.cat([trial.weights[step] for trial in shard_trials], dim=1)
        difference = weights - whole_trial.weights[step]
        change = whole_trial.weights[step] - whole_trial.weights[0]
        if difference.norm() > TOLERANCE * change.norm():
            return "its step on a shard of a weight is another one"
    return ""


def _shard_places(mesh: DeviceMesh | None) -> list[Place]:
    """Return functions from a small weight to its shards, one function for each shard.

    FSDP2 divides rows into a DTensor. ZeRO and FSDP1 cut the flat weight in two.
    """
    if mesh is not None:
        return [lambda weight: distribute_tensor(weight, mesh, [Shard(0)])]
    return [
        lambda weight: weight.flatten()[:FLAT_CUT],
        lambda weight: weight.flatten()[FLAT_CUT:],
    ]


class _Trial:
    """Steps of an optimizer on small weights.

    Attributes:
        error: what went wrong; "" if nothing did. Nothing else is there then.
        weights: before the first step and after each step; [groups, numbers of a weight].
        numbers: numbers in the optimizer's state and in the options of its groups.
        holds_rows_or_columns: whether a tensor in its state has the length of a row or a column.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        shapes: Sequence[tuple[int, ...]],
        device: torch.device,
        place: Place,
    ) -> None:
        parameters = [nn.Parameter(place(_small_weight(shape, device)).clone()) for shape in shapes]
        self.error = ""
        self.weights = [_stacked(parameters)]
        with _trained_instead(optimizer, parameters):
            try:
                for step in range(STEPS):
                    for parameter, shape in zip(parameters, shapes, strict=True):
                        parameter.grad = place(_small_gradient(shape, step, device)).clone()
                    optimizer.step()
                    self.weights.append(_stacked(parameters))
            except Exception as error:  # an optimizer may raise anything
                first_line = next(iter(str(error).strip().splitlines()), "")
                self.error = f"{type(error).__name__}: {first_line}"
                return
            options = [_without(group, "params") for group in optimizer.param_groups]
            values = list(_numbers_and_tensors([options, *optimizer.state.values()]))
        self.numbers = [
            float(_whole(value)) if isinstance(value, Tensor) else value
            for value in values
            if _is_number(value)
        ]
        self.holds_rows_or_columns = any(
            _has_row_or_column(value) for value in values if isinstance(value, Tensor)
        )


@contextmanager
def _trained_instead(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Give an optimizer one other parameter for each group with any, and no state.

    Restore it after the block.
    """
    attributes = dict(vars(optimizer))
    groups = list(optimizer.param_groups)
    state = dict(optimizer.state)
    groups_with_parameters = [group for group in groups if group["params"]]
    new_groups: list[dict[str, Any]] = []
    for group, parameter in zip(groups_with_parameters, parameters, strict=True):
        options = deepcopy(_without(group, "params", "param_names"))
        if options.get("lr") is not None:
            options["lr"] = LEARNING_RATE
        new_groups.append({**options, "params": [parameter]})
    # In place, because an optimizer that wraps another optimizer shares both with it.
    optimizer.param_groups[:] = new_groups
    optimizer.state.clear()
    try:
        with torch.random.fork_rng():
            if hasattr(optimizer, "train"):
                optimizer.train()  # an optimizer without a schedule steps in this mode only
            yield
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        optimizer.param_groups[:] = groups
        optimizer.state.clear()
        optimizer.state.update(state)


def _without(group: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the options of a group of parameters without some of them."""
    return {name: value for name, value in group.items() if name not in names}


def _has_matrix(group: dict[str, Any]) -> bool:
    """Return whether a parameter of a group has several dimensions."""
    # ZeRO-3 leaves no numbers in a parameter, and keeps its shape in `ds_shape`.
    shapes = [getattr(parameter, "ds_shape", parameter.shape) for parameter in group["params"]]
    return any(len(shape) > 1 for shape in shapes)


def _small_weight(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the first value of a small weight."""
    return 0.01 * _random(shape, seed=0).to(device)


def _small_gradient(shape: tuple[int, ...], step: int, device: torch.device) -> Tensor:
    """Return the gradient of a step for a small weight.

    It grows and shrinks over the steps in the first flat shard. In the second it changes its sign.
    An optimizer that sees only one of them would scale its step otherwise.
    """
    is_in_first_shard = torch.arange(math.prod(shape)).view(shape) < FLAT_CUT
    sizes = torch.where(is_in_first_shard, 2.0 ** min(step, STEPS - step), (-1.0) ** step)
    # Most of it is the same in each step, so that its sign means something.
    directions = _random(shape, seed=1) + 0.1 * _random(shape, seed=2 + step)
    return (0.01 * sizes * directions).to(device)


def _random(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return random numbers, the same on all ranks, without drawing torch's own."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _numbers_and_tensors(state: Any) -> Iterator[float | Tensor]:
    """Return the numbers and tensors inside nested containers."""
    if isinstance(state, Tensor | float | int):
        yield state
    elif isinstance(state, dict | list | tuple):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _numbers_and_tensors(value)


def _is_number(value: float | Tensor) -> bool:
    return not isinstance(value, Tensor) or value.numel() == 1


def _has_row_or_column(tensor: Tensor) -> bool:
    """Return whether a tensor has a number for each row or column, and not for each number."""
    has_all_numbers = tensor.numel() % (ROWS * COLUMNS) == 0
    return not has_all_numbers and not {ROWS, COLUMNS}.isdisjoint(tensor.shape)


def _all_close(numbers: Sequence[float], expected: Sequence[float]) -> bool:
    """Return whether numbers are as many as expected, and about equal."""
    return len(numbers) == len(expected) and all(
        math.isclose(number, expected_number, rel_tol=TOLERANCE)
        for number, expected_number in zip(numbers, expected, strict=True)
    )


def _whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor, of which a rank may have a shard. A collective for shards."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _stacked(parameters: Sequence[Tensor]) -> Tensor:
    """Return a copy of the whole weights [groups, numbers of a weight], which have equal sizes."""
    return torch.stack([_whole(parameter.detach()).flatten() for parameter in parameters])
