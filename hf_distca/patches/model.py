"""Checks whether a transformers model can be planned, and the settings of its plans."""

import inspect
import logging
from collections import Counter
from dis import get_instructions
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from transformers import PreTrainedModel

from hf_distca.config import DistCAConfig
from hf_distca.kernels import Kernel, Need, choose_kernel, get_kernel
from hf_distca.patches.adapters import check_adapters
from hf_distca.patches.dropout import check_dropout
from hf_distca.patches.kinds import MIXING, attention_kinds, attention_params, decoder_attentions, hands_on
from hf_distca.patches.layers import check_layers, decoder_layers, has_attention, mixing_layers
from hf_distca.patches.masks import CHANGING_MASKS
from hf_distca.patches.mixing import mixing_modules, takes_keywords
from hf_distca.patches.register import ATTENTION_NAME
from hf_distca.plan import AttentionKind
from hf_distca.planner.settings import PlanSettings
from hf_distca.units import AUTO

logger = logging.getLogger(__name__)


def plan_settings(
    model: PreTrainedModel,
    config: DistCAConfig,
    *,
    ranks: int,
    device: torch.device,
    dtype: torch.dtype | None = None,
    ranks_per_node: int | tuple[int, ...] = 1,
) -> PlanSettings:
    """Return the settings of plans for a model, after checking that the model can be planned.

    With `config.attention_kernel="auto"` the kernel is chosen here, and rank 0 logs the choice.

    Args:
        model: A model that was loaded with `attn_implementation="distca"`.
        config: Settings for packing and balancing.
        ranks: Number of ranks that train together.
        device: Device of this rank.
        dtype: Dtype of core attention. None takes the model's. Under autocast give autocast's dtype.
        ranks_per_node: Number of ranks that share a node, used where `config.ranks_per_node` is "auto".

    Raises:
        ValueError: The model cannot be planned, has no layers for `config.ping_pong`, the kernel does not support its
            attention, or the nodes do not add up to the number of ranks.
        ImportError: The package of the kernel is not installed.
    """
    attentions = checked_attentions(model)
    model = base_model(model)
    ping_pong = config.ping_pong is not False
    if config.ping_pong is True:
        check_layers(model)
    elif ping_pong:
        ping_pong = bool(decoder_layers(model))
    layout = document_layout(model, config)
    dtype = model.dtype if dtype is None else dtype
    kinds = attention_kinds(model, attentions)
    needs = [Need(dtype, kind.dim_qk, kind.dim_v, attention_params(model.config, kind)) for kind in kinds]
    kernel = _kernel(config.attention_kernel, device, needs)
    planning = config.planning(ranks, ranks_per_node)
    return PlanSettings(
        **{**planning, "document_layout": layout, "ping_pong": ping_pong and planning["ping_pong"]},
        kinds=kinds,
        bytes_per_value=dtype.itemsize,
        row_overhead=kernel.row_overhead,
        gather_cost=kernel.gather_cost,
        kernel=kernel.name,
    )


def document_layout(model: PreTrainedModel, config: DistCAConfig) -> str:
    """Return the document layout for a model: "whole" if the model mixes along the row without attention.

    Raises:
        ValueError: the setting cuts documents of such a model.
    """
    mixing = mixing_layers(model)
    if not mixing:
        return config.planned_layout
    (module, *_) = mixing_modules(mixing[0])
    if config.document_layout not in (AUTO, "whole"):
        raise ValueError(
            f"document_layout={config.document_layout!r} cuts documents, and {type(module).__name__} in "
            f"{type(model).__name__} would be wrong for one that is cut: it mixes the rows of a document otherwise "
            "than by attention. Set document_layout='whole', which 'auto' is for this model"
        )
    if config.document_layout == AUTO and (not dist.is_initialized() or dist.get_rank() == 0):
        logger.info(
            "documents stay whole on their rank (document_layout='whole'): %s in %s mixes the rows of a document "
            "otherwise than by attention",
            type(module).__name__,
            type(model).__name__,
        )
    return "whole"


def _kernel(name: str, device: torch.device, needs: list[Need]) -> Kernel:
    """Return the kernel of this name; for "auto", rank 0 logs the choice and why faster kernels are unavailable."""
    if name != "auto":
        return get_kernel(name, device, needs)
    choice = choose_kernel(device, needs)
    if not dist.is_initialized() or dist.get_rank() == 0:
        level = logging.WARNING if choice.passed_over else logging.INFO
        reasons = "".join(f"\n- {reason}" for reason in choice.passed_over.values())
        faster = f"; faster here, but not to be had:{reasons}" if reasons else ""
        logger.log(level, "core attention is computed by kernel %r%s", choice.kernel.name, faster)
    return choice.kernel


def base_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model itself, without PEFT around it."""
    inner: Any = model
    base: PreTrainedModel = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    return base


def layers_by_kind(model: nn.Module) -> Counter[AttentionKind]:
    """Return the number of attention layers of each kind."""
    base = base_model(model)
    attentions = checked_attentions(base)
    return Counter(attention_kinds(base, {name: module})[0] for name, module in attentions.items())


def checked_attentions(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return a model's attention layers by name, after checking that a planned step would be right.

    Args:
        model: a transformers model, or a PEFT model around one.

    Raises:
        ValueError: the model breaks an assumption of planned steps, named in the message: attention interface,
            positions, causality, masks, biases, dropout, keywords, mixing along the row, loss or adapters.
    """
    check_adapters(model)
    model = base_model(model)
    config = model.config.get_text_config(decoder=True)
    attentions = decoder_attentions(model)
    if not attentions:
        raise ValueError(
            f"{type(model).__name__} does not run its attention through transformers' AttentionInterface, in modules "
            "that are named as transformers names them (a class ...Attention with a layer_idx); it can train with "
            f"{_other_implementations(model)}, but not with planned attention"
        )
    name = config._attn_implementation
    if name != ATTENTION_NAME:
        raise ValueError(
            f"{type(model).__name__} runs attn_implementation={name!r}; load it with "
            f'attn_implementation="{ATTENTION_NAME}" or call model.set_attn_implementation("{ATTENTION_NAME}")'
        )
    if config.model_type in CHANGING_MASKS:
        raise ValueError(
            f"the layers of {type(model).__name__} lay a mask of their own over the causal one, made from the values; "
            f"a plan cannot express it. This model can train with {_other_implementations(model)}"
        )
    check_dropout(config, attentions)
    _check_positions(model)
    _check_causal(model, attentions)
    for module_name, module in attentions.items():
        if hands_on(module, "position_bias"):
            raise ValueError(
                f"{module_name} of {type(model).__name__} adds a bias to its scores (position_bias), one for each "
                "pair of a query and a key, which a plan does not exchange; this model can train with "
                f"{_other_implementations(model)}, but not with planned attention"
            )
    _check_mixing(model)
    for module in [*attentions.values(), *filter(has_attention, decoder_layers(model))]:
        if not _hands_keywords_on(module):
            raise ValueError(
                f"{type(model).__name__} drops keywords on the way to its attention ({type(module).__name__}.forward "
                f"takes none, or does not use them), so the plan would not reach it; this model can train with "
                f"{_other_implementations(model)}, but not with planned attention"
            )
    _check_loss(model)
    return attentions


def check_reentrant(model: PreTrainedModel) -> None:
    """Raise if reentrant checkpointing would lose gradients of the model, as it does without hf_distca.

    Raises:
        ValueError: later layers read keys and values of earlier ones, to which a reentrant checkpoint passes no
            gradient.
    """
    for name, module in decoder_attentions(base_model(model)).items():
        if getattr(module, "is_kv_shared_layer", False):
            raise ValueError(
                f"{name} reads the keys and values of an earlier layer, and a reentrant checkpoint passes no gradient "
                "back to them; set gradient_checkpointing_kwargs={'use_reentrant': False}"
            )


def _check_positions(model: PreTrainedModel) -> None:
    """Raise unless the model takes positions from the batch, from 0 on in each document."""
    reason = None
    for name, module in model.named_modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            reason = f"{name} of {type(model).__name__} numbers positions from its padding token on, not from 0"
    if not _takes_positions(model):
        reason = (
            f"{type(model).__name__} takes no position_ids: it numbers the positions of a row by itself, and does not "
            "begin again at 0 with each document"
        )
    if reason is not None:
        raise ValueError(
            f"{reason} as packed batches do; this model can train with {_other_implementations(model)}, but not with "
            "planned attention"
        )


def _takes_positions(model: PreTrainedModel) -> bool:
    """Return whether a model's forward names position_ids, or passes keywords to a decoder whose forward does."""
    if "position_ids" in inspect.signature(model.forward).parameters:
        return True
    decoder: Any = model.get_decoder()
    return takes_keywords(model) and "position_ids" in inspect.signature(decoder.forward).parameters


def _check_causal(model: PreTrainedModel, attentions: dict[str, nn.Module]) -> None:
    """Raise if rows of a model attend to later rows, or to an encoder's rows."""
    config = model.config.get_text_config(decoder=True)
    not_causal = [name for name, module in attentions.items() if not getattr(module, "is_causal", True)]
    if not getattr(config, "is_causal", True):  # its masks are not causal, whatever its modules say
        not_causal = list(attentions)
    if not_causal:
        decoder = "" if getattr(config, "is_decoder", True) else "set is_decoder=True in its config, else "
        raise ValueError(
            f"{not_causal[0]} of {type(model).__name__} is not causal: its rows attend to later ones or to an "
            f"encoder's, and a plan knows earlier rows only; {decoder}this model can train with "
            f"{_other_implementations(model)}, but not with planned attention"
        )


def _check_loss(model: PreTrainedModel) -> None:
    """Raise if a stock model computes its own loss, which knows only its own rank's targets."""
    forward = inspect.unwrap(type(model).forward)
    computes_loss = "labels" in inspect.signature(forward).parameters
    is_stock = forward.__module__.startswith("transformers.")
    if computes_loss and is_stock and "loss_function" not in forward.__code__.co_names:
        raise ValueError(
            f"{type(model).__name__} computes its loss without transformers' loss function, as the mean over its own "
            "rows: ranks with different numbers of targets would have no exact loss. This model can train with "
            f"{_other_implementations(model)} and transformers' Trainer"
        )


def _check_mixing(model: PreTrainedModel) -> None:
    """Raise unless every layer that mixes along the row is found and gets the plan."""
    config = model.config.get_text_config(decoder=True)
    layers = mixing_layers(model)
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    expected = sum(layer_type in MIXING for layer_type in types)
    if len(layers) < expected:
        raise ValueError(
            f"{type(config).__name__} has {expected} layers of the types {list(MIXING)}, but {len(layers)} have a "
            "module that is known to mix along the row (with a convolution, or attention of its own); in the others "
            f"documents could not be kept apart. This model can train with {_other_implementations(model)}, but not "
            "with planned attention"
        )
    for layer in layers:
        if not takes_keywords(layer):
            raise ValueError(
                f"{type(layer).__name__}.forward has no **kwargs, so the plan would not reach the module in it that "
                f"mixes along the row, and documents would mix; this model can train with "
                f"{_other_implementations(model)}, but not with planned attention"
            )


def _hands_keywords_on(module: nn.Module) -> bool:
    """Return whether a module's forward accepts keywords that it does not name, and uses them."""
    if not takes_keywords(module):
        return False
    forward: Any = next(vars(cls)["forward"] for cls in type(module).__mro__ if _is_of_model(cls))
    code = inspect.unwrap(forward).__code__
    keywords = code.co_varnames[code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)]
    loaded = [step.argval for step in get_instructions(code) if step.opname.startswith("LOAD")]
    return any(keywords in (names if isinstance(names, tuple) else (names,)) for names in loaded)


def _is_of_model(cls: type) -> bool:
    """Return whether a class has a forward of its own that is not hf_distca's."""
    return "forward" in vars(cls) and not vars(cls)["forward"].__module__.startswith("hf_distca.")


def _other_implementations(model: PreTrainedModel) -> list[str]:
    """Return the stock attention implementations that the model supports."""
    supported = {
        "sdpa": "_supports_sdpa",
        "flash_attention_2": "_supports_flash_attn",
        "flex_attention": "_supports_flex_attn",
    }
    return ["eager", *(name for name, flag in supported.items() if getattr(model, flag, False))]
