"""Models that plans cannot train exactly, and why."""

import inspect
import re
from collections.abc import Iterator
from dis import get_instructions
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_distca.models.decoder import (
    base_model,
    decoder_attentions,
    decoder_layers,
    hands_on,
    has_attention,
    mixing_layers,
    takes_keywords,
)
from hf_distca.models.kinds import MIXING, layer_types
from hf_distca.plan import ATTENTION_NAME

CHANGING_MASKS = ("doge",)
"""Model types whose layers derive a mask of their own from the given mask."""
IN_CONFIG = re.compile(r"(?!encoder_)(.*_)?(attn|attention)_.*drop.*")
"""Config fields: attention_dropout, attn_pdrop, attention_probs_dropout_prob, decoder_attention_dropout_rate, ..."""
IN_MODULE = re.compile(r"(attn|attention)_.*drop.*|dropout(_p|_prob)?")
"""Attributes of an attention layer; there plain "dropout" also means dropout of the weights."""
ADAPTERS = {
    "ADALORA": "adds a penalty to the loss of every micro-batch on every rank, so that it would count many times",
    "SHADOW": "adds the loss of a second decoder, which takes targets for unshifted labels",
    "LILY": "averages its routers over all rows of a rank, so that documents would change one another",
    "POLY": "needs task_ids with every example, which packed rows do not carry",
}
"""PEFT's types of adapters, and what they do that a planned step would compute wrongly."""


def check_model(model: PreTrainedModel) -> None:
    """Raise if a planned step of a model would be wrong.

    Args:
        model: a transformers model, or a PEFT model around one.

    Raises:
        ValueError: the model breaks an assumption of planned steps, named in the message: adapters, attention
            interface, dropout, masks, positions, causality, biases, mixing along the row, keywords or loss.
    """
    for name, adapter in getattr(model, "peft_config", {}).items():
        if reason := _reason_of_adapter(adapter):
            kind = getattr(adapter.peft_type, "value", adapter.peft_type)
            raise ValueError(
                f"adapter {name!r} ({kind}) {reason}. Use an adapter that processes each token alone, such as LoRA, "
                "or train with attn_implementation='sdpa' and transformers' Trainer"
            )
    for reason in _reasons(base_model(model)):
        raise ValueError(reason)


def _reason_of_adapter(adapter: Any) -> str | None:
    if adapter.is_prompt_learning:
        return "puts virtual tokens before the rows of a batch, but a packed row holds many documents or a part of one"
    if getattr(adapter, "alora_invocation_tokens", None):
        return (
            "begins behind the last invocation tokens of a row (alora_invocation_tokens), but a packed row holds many "
            "documents or a part of one"
        )
    return ADAPTERS.get(adapter.peft_type)


def _reasons(model: PreTrainedModel) -> Iterator[str]:
    """Yield each reason why a planned step of a model would be wrong, and what to set."""
    model_name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    attentions = decoder_attentions(model)
    supported = {
        "sdpa": "_supports_sdpa",
        "flash_attention_2": "_supports_flash_attn",
        "flex_attention": "_supports_flex_attn",
    }
    others = ["eager", *(name for name, flag in supported.items() if getattr(model, flag, False))]
    instead = f"train it with transformers' Trainer and one of {others} as attn_implementation"
    if not attentions:
        yield (
            f"{model_name} does not run its attention through transformers' AttentionInterface, in modules of a class "
            f"...Attention with a layer_idx, so a plan cannot reach its attention; {instead}"
        )
    if config._attn_implementation != ATTENTION_NAME:
        yield (
            f"{model_name} runs attn_implementation={config._attn_implementation!r}; load it with "
            f'attn_implementation="{ATTENTION_NAME}" or call model.set_attn_implementation("{ATTENTION_NAME}")'
        )
    if config.model_type in CHANGING_MASKS:
        yield (
            f"the layers of {model_name} compute a custom mask from the values and add it to the causal mask, which a "
            f"plan cannot express; {instead}"
        )
    for name, value in config.to_dict().items():
        if IN_CONFIG.fullmatch(name) and _probability(value) > 0:
            yield (
                f"{name} is {value}, but workers cannot draw the same dropped attention weights. Load the model with "
                f"{name}=0.0"
            )
    for layer, module in attentions.items():
        for name, value in (*vars(module).items(), *module.named_children()):
            if IN_MODULE.fullmatch(name) and (probability := _probability(value)) > 0:
                yield (
                    f"{name} of {layer} is {probability}, but workers cannot draw the same dropped attention weights. "
                    "Set it to 0.0 in every attention layer"
                )
    if not _takes_positions(model):
        yield (
            f"{model_name} takes no position_ids: it counts the positions of a whole row, and does not restart at 0 "
            f"with each document, as packed batches need; {instead}"
        )
    for name, module in model.named_modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            yield (
                f"{name} of {model_name} counts positions from its padding token, not from 0, as packed batches need; "
                f"{instead}"
            )
    for name, module in attentions.items():
        # A config that is not causal makes masks that are not, whatever the modules say.
        if not (getattr(config, "is_causal", True) and getattr(module, "is_causal", True)):
            hint = "" if getattr(config, "is_decoder", True) else "set is_decoder=True in its config, or "
            yield (
                f"{name} of {model_name} is not causal: its rows attend to later rows or to an encoder's, but a plan "
                f"supports attention to earlier rows only; {hint}{instead}"
            )
    for name, module in attentions.items():
        if hands_on(module, "position_bias"):
            yield (
                f"{name} of {model_name} adds a bias to its scores (position_bias) for each pair of a query and a "
                f"key, which a plan does not exchange; {instead}"
            )
    mixing = mixing_layers(model)
    expected = sum(layer_type in MIXING for layer_type in layer_types(config))
    if len(mixing) < expected:
        yield (
            f"{type(config).__name__} has {expected} layers of the types {list(MIXING)}, but only in {len(mixing)} of "
            "them a module is known that mixes along the row (with a convolution, or attention of its own); documents "
            f"could not be kept apart in the others; {instead}"
        )
    for module in mixing:
        if not takes_keywords(module):
            yield (
                f"{type(module).__name__}.forward has no **kwargs, so the plan would not reach the module in it that "
                f"mixes along the row, and documents would mix; {instead}"
            )
    for module in (*attentions.values(), *filter(has_attention, decoder_layers(model))):
        if not _hands_keywords_on(module):
            yield (
                f"{model_name} drops keywords on the way to its attention: {type(module).__name__}.forward takes "
                f"none, or does not use them, so the plan would not reach it; {instead}"
            )
    forward = inspect.unwrap(type(model).forward)
    computes_loss = "labels" in inspect.signature(forward).parameters
    is_stock = forward.__module__.startswith("transformers.")
    if computes_loss and is_stock and "loss_function" not in forward.__code__.co_names:
        yield (
            f"{model_name} does not use transformers' loss function, but takes the mean over its own rows, so ranks "
            f"with different numbers of targets would have no exact loss; {instead}"
        )


def _probability(value: object) -> float:
    if isinstance(value, nn.Dropout):
        return value.p
    return float(value) if isinstance(value, int | float) else 0.0


def _takes_positions(model: PreTrainedModel) -> bool:
    """Return whether a model's forward names position_ids, or passes keywords to a decoder whose forward does."""
    if "position_ids" in inspect.signature(model.forward).parameters:
        return True
    decoder: Any = model.get_decoder()
    return takes_keywords(model) and "position_ids" in inspect.signature(decoder.forward).parameters


def _hands_keywords_on(module: nn.Module) -> bool:
    """Return whether a module's forward accepts keywords that it does not name, and uses them."""
    if not takes_keywords(module):
        return False
    forwards: list[Any] = [vars(cls)["forward"] for cls in type(module).__mro__ if "forward" in vars(cls)]
    forward = next(forward for forward in forwards if not forward.__module__.startswith("hf_distca."))
    code = inspect.unwrap(forward).__code__
    keywords = code.co_varnames[code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)]
    loaded = [step.argval for step in get_instructions(code) if step.opname.startswith("LOAD")]
    return any(keywords in (names if isinstance(names, tuple) else (names,)) for names in loaded)


def check_layers(model: PreTrainedModel) -> None:
    """Raise ValueError if a model has no layers in which two nano-batches can take turns."""
    if not decoder_layers(model):
        raise ValueError(
            f"{type(model).__name__} has no decoder layer based on transformers' GradientCheckpointingLayer, which "
            "ping-pong needs; set ping_pong=False"
        )


def check_reentrant(model: nn.Module) -> None:
    """Raise if reentrant checkpointing would lose gradients of the model, as it does without hf_distca.

    Raises:
        ValueError: later layers read keys and values of earlier ones, to which a reentrant checkpoint passes no
            gradient.
    """
    for name, module in decoder_attentions(base_model(model)).items():
        if getattr(module, "is_kv_shared_layer", False):
            raise ValueError(
                f"{name} reads the keys and values of an earlier layer, but a reentrant checkpoint passes no gradient "
                "back to them; set gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
