"""Shape of a model: its active parameters, before and after core attention."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_distca.models.decoder import base_model, has_attention, mixing_layers, mixing_modules
from hf_distca.models.kinds import layers_by_kind
from hf_distca.models.mixing_modules import LIGHTNING, RECURRENCES, SCAN, functions
from hf_distca.predict.shapes import MixingShape, ModelShape

LAST = ("out_proj", "o_proj")
"""Names of the last matrix of a mixing module."""

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names of the number of a layer's experts in configs."""


def weights_met(model: PreTrainedModel) -> dict[nn.Parameter, float]:
    """Return for each parameter how many of its numbers are active for a token.

    Embedding and output head, which may be tied, are left out. Experts count by the share of
    experts that a token uses.
    """
    config = model.config.get_text_config(decoder=True)
    counts = [getattr(config, name, None) for name in EXPERTS]
    experts = next((count for count in counts if count), 1)
    experts_per_token = getattr(config, "num_experts_per_tok", None) or experts
    expert_share = float(experts_per_token) / experts
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    table_ids = {
        id(weight) for table in tables if table is not None for weight in table.parameters()
    }
    active: dict[nn.Parameter, float] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) not in table_ids:
            share = expert_share if ".experts." in name else 1.0
            active[parameter] = count_of(parameter) * share
    return active


def count_of(parameter: Any) -> int:
    """Return how many numbers a parameter has."""
    if hasattr(parameter, "ds_numel"):  # ZeRO-3 divided it
        return int(parameter.ds_numel)
    quantized = getattr(parameter, "quant_state", None)
    if quantized is not None:  # bitsandbytes packed two numbers into a byte
        return int(quantized.shape.numel())
    return int(parameter.numel())


def model_shape(model: nn.Module) -> ModelShape:
    """Return the shape of a model for simulations."""
    base = base_model(model)
    layers = layers_by_kind(model)
    depth = sum(layers.values())
    hidden = base.config.get_text_config(decoder=True).hidden_size
    mixing = mixing_shape(base)
    # 1. Projections of queries, keys and values come before core attention.
    numbers_before = 0
    for kind, count in layers.items():
        width = kind.q_heads * kind.dim_qk + kind.kv_heads * (kind.dim_qk + kind.dim_v)
        numbers_before += count * hidden * width
    # 2. All else comes after it. Mixing modules are counted by themselves.
    numbers_after = int(sum(weights_met(base).values()) - numbers_before)
    if mixing is not None:
        numbers_after -= mixing.layers * (mixing.before_mixing + mixing.after_mixing)
    head = base.get_output_embeddings()
    numbers_of_head = 0 if head is None else count_of(head.weight)
    return ModelShape(
        layers,
        hidden,
        numbers_before // depth,
        numbers_after // depth,
        numbers_of_head,
        base.num_parameters(),
        mixing,
    )


def mixing_shape(model: PreTrainedModel) -> MixingShape | None:
    """Return the sizes of a model's layers that mix rows in order; None if it has none."""
    all_modules: list[Any] = []
    numbers_before = 0.0
    numbers_after = 0.0
    weights: Mapping[Any, float] = weights_met(model)
    for layer in mixing_layers(model):
        modules = mixing_modules(layer)
        # 1. A module's last matrix comes after the mixing, and its others before.
        numbers_of_modules = sum(_active_numbers(module, weights) for module in modules)
        last = sum(
            _active_numbers(getattr(module, name), weights)
            for module in modules
            for name in LAST
            if hasattr(module, name)
        )
        numbers_before += numbers_of_modules - last
        numbers_after += last
        # 2. Beside attention only the module's own matrices count, and in a layer of its own all.
        if not has_attention(layer):
            numbers_after += _active_numbers(layer, weights) - numbers_of_modules
        all_modules += modules
    if not all_modules:
        return None
    # 3. A convolution reads the rows of its kernel before a segment. All modules are alike.
    first_module = all_modules[0]
    convolution = next(
        (inner for inner in first_module.modules() if isinstance(inner, nn.Conv1d)), None
    )
    channels, halo = 0, 0
    if convolution is not None:
        channels = convolution.out_channels
        halo = convolution.kernel_size[0] - 1
    count = len(all_modules)
    sizes = count, round(numbers_before / count), round(numbers_after / count), channels, halo
    return _with_recurrence(first_module, sizes)


def _active_numbers(module: nn.Module, weights: Mapping[Any, float]) -> float:
    """Return how many numbers of a module are active for a token, by `weights_met`."""
    return sum(weights.get(parameter, 0.0) for parameter in module.parameters())


def _with_recurrence(module: Any, sizes: tuple[int, int, int, int, int]) -> MixingShape:
    """Return the shape of mixing layers with the heads and states of a module's recurrence.

    Args:
        sizes: the first fields of `MixingShape`.
    """
    names = functions(module) or ()
    if not RECURRENCES.intersection(names):  # no recurrence, or one of which nothing is known
        return MixingShape(*sizes)
    if LIGHTNING in names:
        return MixingShape(*sizes, module.num_attention_heads, (module.head_dim, module.head_dim))
    heads = getattr(module, "num_v_heads", None) or module.num_heads
    if SCAN in names:
        return MixingShape(*sizes, heads, (module.ssm_state_size, module.head_dim))
    key_dim = getattr(module, "head_k_dim", None) or module.head_dim
    value_dim = getattr(module, "head_v_dim", None) or module.head_dim
    return MixingShape(*sizes, heads, (key_dim, value_dim), delta_rule=True)
