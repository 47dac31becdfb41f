"""Memory of weights, gradients and an optimizer with two moments (Adam) on a rank, by strategy."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import nn

from hf_distca.models.decoder import decoder_layers
from hf_distca.models.tensor_parallel import ranks_of_share

Strategy = Literal["ddp", "fsdp2", "zero1", "zero2", "zero3"]
STRATEGIES: tuple[Strategy, ...] = ("ddp", "fsdp2", "zero1", "zero2", "zero3")

FLOAT32, BFLOAT16 = 4, 2
"""Bytes of a number."""


@dataclass(frozen=True)
class Parameters:
    """Numbers and bytes of parameters.

    Attributes:
        count: numbers of all parameters.
        size: bytes of all parameters.
        trained: numbers of parameters with a gradient.
        trained_size: bytes of parameters with a gradient.
    """

    count: int
    size: int
    trained: int
    trained_size: int

    @staticmethod
    def of(modules: Iterable[nn.Module]) -> "Parameters":
        """Count the parameters of modules, shared ones once.

        Parameters that ZeRO-3 or FSDP2 divided count as whole; of those divided by tensor parallelism, a rank's share
        counts.
        """
        found = {parameter: None for module in modules for parameter in module.parameters()}
        counts = {parameter: _numbers(parameter) for parameter in found}
        trained = [parameter for parameter in found if parameter.requires_grad]
        return Parameters(
            sum(counts.values()),
            sum(count * parameter.itemsize for parameter, count in counts.items()),
            sum(counts[parameter] for parameter in trained),
            sum(counts[parameter] * parameter.itemsize for parameter in trained),
        )


def _numbers(parameter: nn.Parameter) -> int:
    count: int = getattr(parameter, "ds_numel", parameter.numel())
    return count // ranks_of_share(parameter)


@dataclass(frozen=True)
class ModelState:
    """Bytes on a rank.

    Attributes:
        weights: parameters, including parameters gathered from other ranks at a time.
        gradients: gradients, and the buckets in which ranks reduce gradients.
        optimizer: two moments, and a copy of the weights if the optimizer has its own.
    """

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Sum of all bytes."""
        return self.weights + self.gradients + self.optimizer


def model_state(model: nn.Module, strategy: Strategy, ranks: int, *, mixed: bool) -> ModelState:
    """Return the memory of a model's state on a rank, kept from step to step.

    - ddp: the parameters as they are; with several ranks, DistributedDataParallel's buckets beside the gradients.
    - fsdp2: shards of float32 weights; gathered weights, and gradients before they are reduced.
    - zero1, zero2, zero3: DeepSpeed's weights in the dtype of computation and shards of a float32 copy beside the
      moments. zero2 shards gradients, zero3 weights too.

    Gathered at a time: all weights outside the decoder layers, one layer, and the next layer, which is prefetched.
    Gradients are whole until a layer's backward has ended. Buckets of FSDP2 and DeepSpeed, whose size is a setting,
    are left out.

    Args:
        ranks: number of ranks that share the state.
    """
    width = BFLOAT16 if mixed else FLOAT32
    whole = Parameters.of([model])
    if strategy == "ddp":
        buckets = whole.trained_size if ranks > 1 else 0
        return ModelState(whole.size, whole.trained_size + buckets, 2 * whole.trained_size)
    layers = [Parameters.of([layer]) for layer in decoder_layers(model)]
    gathered = whole.count - sum(layer.count for layer in layers) + 2 * max(layer.count for layer in layers)
    reduced = whole.trained - sum(layer.trained for layer in layers) + max(layer.trained for layer in layers)
    share, trained_share = -(-whole.count // ranks), -(-whole.trained // ranks)
    if strategy == "fsdp2":
        return ModelState(
            FLOAT32 * share + width * gathered, FLOAT32 * trained_share + width * reduced, 2 * FLOAT32 * trained_share
        )
    return ModelState(
        width * (share + gathered if strategy == "zero3" else whole.count),
        width * (whole.trained if strategy == "zero1" else trained_share + reduced),
        3 * FLOAT32 * trained_share,
    )
