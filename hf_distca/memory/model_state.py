"""Memory of weights, gradients and an optimizer with two moments (Adam) on a rank, by strategy."""

from typing import NamedTuple

from torch import nn

from hf_distca.models.decoder import decoder_layers
from hf_distca.models.tensor_parallel import ranks_of_share
from hf_distca.run import Strategy


class ModelState(NamedTuple):
    """Bytes of weights, gradients and optimizer on a rank."""

    weights: int  # parameters, including parameters gathered from other ranks at a time
    gradients: int  # gradients, and the buckets in which ranks reduce gradients
    optimizer: int  # two moments, and a copy of the weights if the optimizer has its own


def parameter_bytes(module: nn.Module, width: int | None = None, *, trained: bool = False) -> int:
    """Return the bytes of a module's parameters, shared parameters once.

    Parameters that ZeRO-3 or FSDP2 divided count as whole; of those divided by tensor parallelism,
    a rank's share counts. Floating-point numbers have `width` bytes if given; quantized weights,
    whole numbers, count as they are.
    """
    return sum(
        getattr(parameter, "ds_numel", parameter.numel())
        // ranks_of_share(parameter)
        * (width if width and parameter.is_floating_point() else parameter.itemsize)
        for parameter in module.parameters()
        if parameter.requires_grad or not trained
    )


def model_state(model: nn.Module, strategy: Strategy, ranks: int, *, mixed: bool) -> ModelState:
    """Return the memory of a model's state on a rank, kept from step to step.

    - ddp: the parameters as they are; with several ranks, DistributedDataParallel's buckets beside
      the gradients.
    - fsdp2: shards of float32 weights; gathered weights, and gradients before they are reduced.
    - zero1, zero2, zero3: DeepSpeed's weights in the dtype of computation and shards of a float32
      copy beside the moments. zero2 shards gradients, zero3 weights too.

    Gathered at a time: all weights outside the decoder layers, one layer, and the next layer, which
    is prefetched. Gradients are whole until a layer's backward has ended. Buckets of FSDP2 and
    DeepSpeed, whose size is a setting, are left out. The state is divided among `ranks`.
    """
    if strategy == "ddp":
        trained = parameter_bytes(model, trained=True)
        return ModelState(parameter_bytes(model), trained * (2 if ranks > 1 else 1), 2 * trained)
    float32 = 4
    width = 2 if mixed else float32  # bytes of a number in computation

    def at_a_time(count: int, *, trained: bool = False) -> int:
        """Return bytes in computation of some decoder layers and of everything outside of them.

        These are the `count` largest layers.
        """
        layers = [parameter_bytes(layer, width, trained=trained) for layer in decoder_layers(model)]
        return parameter_bytes(model, width, trained=trained) - sum(layers) + count * max(layers)

    def share(width: int, *, trained: bool = False) -> int:
        return -(-parameter_bytes(model, width, trained=trained) // ranks)

    trained_share = share(float32, trained=True)
    gathered = at_a_time(2)
    reduced = at_a_time(1, trained=True)
    if strategy == "fsdp2":
        return ModelState(share(float32) + gathered, trained_share + reduced, 2 * trained_share)
    return ModelState(
        share(width) + gathered if strategy == "zero3" else parameter_bytes(model, width),
        parameter_bytes(model, width, trained=True)
        if strategy == "zero1"
        else share(width, trained=True) + reduced,
        3 * trained_share,
    )
