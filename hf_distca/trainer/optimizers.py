"""Find out whether an optimizer steps on shards of weights as on whole weights, by steps on small weights.

R, C: rows and columns of a small weight
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

ROWS, COLUMNS = 131, 137
"""Size of a small weight: primes that no state has by chance, above the sizes from which optimizers
use rows."""
FLAT_CUT = 2**13
"""Numbers in the first flat shard.

It ends within a row, and between two blocks of an optimizer of 8 bits.
"""
STEPS = 12
"""Number of steps; some optimizers change no weight in the first ones."""
LEARNING_RATE = 0.1
TOLERANCE = 0.03
"""Allowed difference of a weight on shards, relative to its change: Muon multiplies matrices in
bfloat16."""

Place = Callable[[Tensor], Tensor]
"""What makes of a small weight the part or the DTensor that the optimizer gets."""


def check_optimizer(trainer: Trainer) -> None:
    """Raise ValueError if a rank has shards of weights and the optimizer needs whole weights.

    A collective call.
    """
    accelerator, device = trainer.accelerator, trainer.args.device
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
    if why := why_not_on_shards(optimizer, mesh, device):
        raise Run.NEEDS_WHOLE_WEIGHTS.error(optimizer=type(optimizer).__name__, why=why)


def optimizer_named_in(config: Mapping[str, Any]) -> Optimizer | None:
    """Return the optimizer of torch that DeepSpeed makes from its configuration, for one small weight.

    None where the configuration names no optimizer, or one of DeepSpeed's own, which know shards.
    """
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    named = config.get("optimizer")
    if named is None or named["type"].lower() in DEEPSPEED_OPTIMIZERS:
        return None
    options = {name: value for name, value in named.get("params", {}).items() if value != "auto"}
    made: Optimizer = getattr(torch.optim, named["type"])(
        [nn.Parameter(torch.zeros(1, 1))], **options
    )
    return made


def why_not_on_shards(optimizer: Optimizer, mesh: DeviceMesh | None, device: torch.device) -> str:
    """Return why an optimizer's step on shards is not its step on whole weights; "" if it is.

    Small weights take the place of the optimizer's weights for some steps. This is a collective
    call of `mesh`.

    Args:
        mesh: Ranks among which FSDP2 divides the rows of weights, as DTensors. None stands for flat
            shards, of ZeRO and of FSDP1.
    """
    rows = ROWS if mesh is None else math.ceil(ROWS / mesh.size()) * mesh.size()
    groups = [group for group in optimizer.param_groups if group["params"]]
    shapes = [(rows, COLUMNS) if _has_matrix(group) else (rows * COLUMNS,) for group in groups]
    whole = _Trial(optimizer, shapes, device, lambda weight: weight)
    if whole.error:
        return f"its step fails on a small weight: {whole.error}"
    if torch.equal(whole.weights[0], whole.weights[-1]):
        return "its step changes no weight"
    if mesh is None and whole.holds_rows_or_columns:
        return "it keeps numbers for each row or column of a weight"
    places: list[Place] = [
        lambda weight: weight.flatten()[:FLAT_CUT],
        lambda weight: weight.flatten()[FLAT_CUT:],
    ]
    if mesh is not None:
        places = [lambda weight: distribute_tensor(weight, mesh, [Shard(0)])]
    shards = [_Trial(optimizer, shapes, device, place) for place in places]
    for shard in shards:
        if shard.error:
            return f"its step fails on a shard of a weight: {shard.error}"
        if len(shard.numbers) != len(whole.numbers) or not all(
            map(_are_close, shard.numbers, whole.numbers)
        ):
            return "it keeps numbers that depend on whole weights"
    for step in range(1, STEPS + 1):
        together = torch.cat([shard.weights[step] for shard in shards], dim=1)
        difference, change = together - whole.weights[step], whole.weights[step] - whole.weights[0]
        if difference.norm() > TOLERANCE * change.norm():
            return "its step on a shard of a weight is another one"
    return ""


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
            options = [
                {name: x for name, x in group.items() if name != "params"}
                for group in optimizer.param_groups
            ]
            found = list(_numbers_and_tensors([options, *optimizer.state.values()]))
        tensors = [x for x in found if isinstance(x, Tensor)]
        self.numbers = [
            float(_whole(x)) if isinstance(x, Tensor) else x for x in found if _is_number(x)
        ]
        self.holds_rows_or_columns = any(map(_has_row_or_column, tensors))


@contextmanager
def _trained_instead(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Give an optimizer one other parameter for each group with any, and no state.

    Restore it after the block.
    """
    attributes, groups, state = (
        dict(vars(optimizer)),
        list(optimizer.param_groups),
        dict(optimizer.state),
    )
    options = [
        {
            name: deepcopy(value)
            for name, value in group.items()
            if name not in ("params", "param_names")
        }
        for group in groups
        if group["params"]
    ]
    for of_group in options:
        if of_group.get("lr") is not None:
            of_group["lr"] = LEARNING_RATE
    # In place, because an optimizer that wraps another optimizer shares both with it.
    optimizer.param_groups[:] = [
        {**of_group, "params": [parameter]}
        for of_group, parameter in zip(options, parameters, strict=True)
    ]
    optimizer.state.clear()
    try:
        with torch.random.fork_rng():
            if hasattr(
                optimizer, "train"
            ):  # an optimizer without a schedule steps in this mode only
                optimizer.train()
            yield
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        optimizer.param_groups[:] = groups
        optimizer.state.clear()
        optimizer.state.update(state)


def _has_matrix(group: dict[str, Any]) -> bool:
    # ZeRO-3 leaves no numbers in a parameter, and keeps its shape in `ds_shape`.
    return any(
        len(getattr(parameter, "ds_shape", parameter.shape)) > 1 for parameter in group["params"]
    )


def _small_weight(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return 0.01 * _random(shape, seed=0).to(device)


def _small_gradient(shape: tuple[int, ...], step: int, device: torch.device) -> Tensor:
    """Return a gradient that grows and shrinks over steps in its first part, and changes its sign in the other."""
    first = torch.arange(math.prod(shape)).view(shape) < FLAT_CUT
    sizes = torch.where(first, 2.0 ** min(step, STEPS - step), (-1.0) ** step)
    # Most of it is the same in each step, so that its sign means something.
    return (0.01 * sizes * (_random(shape, seed=1) + 0.1 * _random(shape, seed=2 + step))).to(
        device
    )


def _random(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return random numbers, the same on all ranks, and leave torch's own random numbers as they are."""
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
    is_of_all_numbers = tensor.numel() % (ROWS * COLUMNS) == 0
    return not is_of_all_numbers and not {ROWS, COLUMNS}.isdisjoint(tensor.shape)


def _are_close(number: float, expected: float) -> bool:
    return math.isclose(number, expected, rel_tol=TOLERANCE)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _stacked(parameters: Sequence[Tensor]) -> Tensor:
    """Return a copy of the whole weights [groups, numbers of a weight], which have equal sizes."""
    return torch.stack([_whole(parameter.detach()).flatten() for parameter in parameters])
