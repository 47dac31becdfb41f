"""Facts of a model that decide whether it can be planned; `checks/model_rules.py` has the rules."""

import inspect
import re
from collections.abc import Iterator
from dis import get_instructions
from functools import cached_property
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from hf_distca.checks.model_rules import ADAPTERS, OBJECT, SETTINGS, STRUCTURE
from hf_distca.checks.refusal import check, check_first, given_as
from hf_distca.models.decoder import (
    backbone,
    base_model,
    decoder_attentions,
    decoder_layers,
    hands_on,
    has_attention,
    mixing_layers,
    stock_forward,
    takes_keywords,
    text_decoder,
)
from hf_distca.models.kinds import MIXING, layer_types
from hf_distca.models.rotary_types import unknown_rotary_modules
from hf_distca.models.tensor_parallel import is_divided_at_load

CHANGING_MASKS = ("doge",)
"""Model types whose layers derive a mask of their own from the given mask."""
IN_CONFIG = re.compile(r"(?!encoder_)(.*_)?(attn|attention)_.*drop.*")
"""Config fields: attention_dropout, attn_pdrop, attention_probs_dropout_prob,
decoder_attention_dropout_rate, ..."""
IN_MODULE = re.compile(r"(attn|attention)_.*drop.*|dropout(_p|_prob)?")
"""Attributes of an attention layer; there plain "dropout" also means dropout of the weights."""
LAYERDROP = ("layerdrop", "decoder_layerdrop")
"""Config fields of the share of a decoder's layers that are skipped at random."""
STOCK_ATTENTION = {
    "sdpa": "_supports_sdpa",
    "flash_attention_2": "_supports_flash_attn",
    "flex_attention": "_supports_flex_attn",
}
"""Attention of transformers, by its name: the attribute of a model class that can run it."""
WRAPPERS = ("torch.nn.parallel.", "torch.distributed.", "torch._dynamo.", "deepspeed.")
"""Packages of classes that wrap a model."""
Z_LOSS = "z_loss_coefficient"
"""Factor of a loss that keeps logits small, which Bamba takes the mean of over a call's rows."""


class GivenModel:
    """Facts of an object that is given as a model."""

    def __init__(self, given: Any) -> None:
        self._given = given
        self._base: Any = base_model(given) if isinstance(given, nn.Module) else None

    @property
    def given(self) -> str:
        """The object in an error."""
        return given_as(self._given)

    @property
    def wrapper(self) -> str | None:
        """What wraps or compiles the model; None if nothing does."""
        given = self._given
        if not isinstance(given, nn.Module):
            return None
        if _is_wrapper(given):
            return type(given).__name__
        return None if given._compiled_call_impl is None else "model.compile() does"

    @property
    def wrapped(self) -> str:
        """Class of the model inside a wrapper."""
        given = self._given
        inner = given
        if _is_wrapper(given):
            inner = getattr(given, "module", None) or getattr(given, "_orig_mod", given)
        return type(inner).__name__

    @property
    def is_model(self) -> bool:
        """Whether it is a model of transformers, or PEFT's around one."""
        return isinstance(self._base, PreTrainedModel)

    @property
    def model(self) -> str:
        """Class of the model."""
        return type(self._base).__name__

    @property
    def loss(self) -> str | None:
        """Transformers' loss that is not of the next tokens; None if it is."""
        loss = getattr(self._base, "loss_type", None) or "ForCausalLM"
        return None if LOSS_MAPPING.get(loss, ForCausalLMLoss) is ForCausalLMLoss else loss


def _is_wrapper(model: nn.Module) -> bool:
    """Return whether a module is a model that DDP, FSDP, DeepSpeed or torch.compile has wrapped."""
    # FSDP2 gives a model another class, which torch makes. A model that transformers divided at
    # load has such a class, too, and can be planned.
    if isinstance(model, FSDPModule):
        return not is_divided_at_load(model)
    return type(model).__module__.startswith(WRAPPERS)


class AdapterFacts(NamedTuple):
    """Facts of an adapter of PEFT."""

    name: str
    kind: str
    is_prompt_learning: bool
    is_alora: bool
    module_dropout: float


def adapters_of(model: nn.Module) -> list[AdapterFacts]:
    """Return the facts of a model's adapters of PEFT."""
    adapters = []
    for name, adapter in getattr(model, "peft_config", {}).items():
        kind = getattr(adapter.peft_type, "value", adapter.peft_type)
        is_alora = bool(getattr(adapter, "alora_invocation_tokens", None))
        module_dropout = float(getattr(adapter, "module_dropout", 0.0))
        adapters.append(
            AdapterFacts(name, kind, adapter.is_prompt_learning, is_alora, module_dropout)
        )
    return adapters


class Dropout(NamedTuple):
    """A probability above 0 with which attention weights are dropped."""

    name: str
    value: float
    layer: str = ""


class ModelFacts:
    """Facts of a model of transformers.

    Each is found when a rule asks for it: later rules may rest on earlier ones.

    Attributes:
        model: class of the model.
        config: config of its text part.
        asks_for_ping_pong: whether the settings demand ping-pong.
    """

    def __init__(self, model: PreTrainedModel, *, ping_pong: bool) -> None:
        self._model = model
        self.model = type(model).__name__
        self.config: Any = model.config.get_text_config(decoder=True)
        self.config_class = type(self.config).__name__
        self.asks_for_ping_pong = ping_pong
        self.mixing_types = list(MIXING)

    @property
    def has_forward(self) -> bool:
        """Whether the model can be called."""
        return type(self._model).forward is not nn.Module.forward

    @cached_property
    def attentions(self) -> dict[str, nn.Module]:
        """Attention layers of the decoder by name."""
        return decoder_attentions(self._model)

    @property
    def stock(self) -> str:
        """Attention with which the model can be trained without plans."""
        names = ["eager"]
        for implementation, flag in STOCK_ATTENTION.items():
            if getattr(self._model, flag, False):
                names.append(implementation)
        return " or ".join(map(repr, names))

    @property
    def has_own_mask(self) -> bool:
        """Whether layers change the mask that they are given."""
        return self.config.model_type in CHANGING_MASKS

    @property
    def config_dropout(self) -> Dropout | None:
        """Dropout of attention weights in the config."""
        for name, value in self.config.to_dict().items():
            if IN_CONFIG.fullmatch(name) and _probability(value) > 0:
                return Dropout(name, value)
        return None

    @property
    def layer_dropout(self) -> Dropout | None:
        """Dropout of attention weights in a layer."""
        for layer, attention in self.attentions.items():
            for name, value in (*vars(attention).items(), *attention.named_children()):
                if IN_MODULE.fullmatch(name) and _probability(value) > 0:
                    return Dropout(name, _probability(value), layer)
        return None

    @property
    def layerdrop(self) -> Dropout | None:
        """Share of the decoder's layers that are skipped at random in training."""
        for name, value in self.config.to_dict().items():
            if name in LAYERDROP and _probability(value) > 0:
                return Dropout(name, value)
        return None

    @property
    def takes_positions(self) -> bool:
        """Whether the model, or the decoder that it passes keywords to, takes position_ids."""
        modules: list[Any] = [self._model]
        if takes_keywords(self._model):
            modules.append(text_decoder(self._model))
        return any("position_ids" in inspect.signature(m.forward).parameters for m in modules)

    @property
    def padding_positions(self) -> str | None:
        """Module that counts positions from its padding token."""
        modules = self._model.named_modules()
        counts = "create_position_ids_from_input_ids"
        return next((name for name, module in modules if hasattr(module, counts)), None)

    @property
    def unknown_rotary(self) -> str | None:
        """Module whose rotary embedding reads the longest position in code that is not known."""
        return next(iter(unknown_rotary_modules(self._model)), None)

    @property
    def mean_of_rows(self) -> Dropout | None:
        """Factor of a mean over a rank's rows that the model adds to its loss."""
        factor = getattr(self._model, Z_LOSS, 0.0)
        return Dropout(Z_LOSS, factor) if factor > 0 else None

    @cached_property
    def not_causal(self) -> str | None:
        """Attention layer whose rows attend to later rows or to an encoder."""
        # A config that is not causal makes masks that are not, whatever the modules say.
        masks_are_causal = getattr(self.config, "is_causal", True)
        for name, attention in self.attentions.items():
            if not (masks_are_causal and getattr(attention, "is_causal", True)):
                return name
        return None

    @property
    def is_decoder(self) -> bool:
        """Whether the config makes a decoder of a model that may be one."""
        return bool(getattr(self.config, "is_decoder", True))

    @property
    def biased(self) -> str | None:
        """Attention layer that adds biases to its scores."""
        layers = self.attentions.items()
        return next((name for name, layer in layers if hands_on(layer, "position_bias")), None)

    @property
    def expected_mixing(self) -> int:
        """Number of layers that mix rows in order, by their types."""
        return sum(layer_type in MIXING for layer_type in layer_types(self.config))

    @property
    def known_mixing(self) -> int:
        """Number of layers in which a module is known that mixes rows in order."""
        return len(mixing_layers(self._model))

    @property
    def unplanned_mixing(self) -> str | None:
        """Class of a layer with such a module that takes no plan."""
        layers = mixing_layers(self._model)
        return next((type(layer).__name__ for layer in layers if not takes_keywords(layer)), None)

    @property
    def drops_keywords(self) -> str | None:
        """Class of a module that drops keywords on the way to attention or to the loss."""
        for module in self._on_the_way():
            if not _hands_keywords_on(module):
                return type(module).__name__
        return None

    def _on_the_way(self) -> Iterator[nn.Module]:
        """Yield the modules that pass the plan and the number of targets on."""
        yield from self.attentions.values()
        yield from (layer for layer in decoder_layers(self._model) if has_attention(layer))
        yield from (text_decoder(self._model), backbone(self._model), self._model)

    @property
    def has_own_loss(self) -> bool:
        """Whether a model of transformers computes a loss without transformers' loss function."""
        forward = inspect.unwrap(type(self._model).forward)
        computes_loss = "labels" in inspect.signature(forward).parameters
        is_stock = forward.__module__.startswith("transformers.")
        return computes_loss and is_stock and "loss_function" not in forward.__code__.co_names

    @property
    def has_layers(self) -> bool:
        """Whether the model has layers in which two nano-batches can take turns."""
        return bool(decoder_layers(self._model))


def _probability(value: object) -> float:
    """Return the probability that a value of a config or of a module means; 0 for anything else."""
    if isinstance(value, nn.Dropout):
        return value.p
    return float(value) if isinstance(value, int | float) else 0.0


def _hands_keywords_on(module: nn.Module) -> bool:
    """Return whether a module's forward accepts keywords that it does not name, and uses them."""
    forward: Any = inspect.unwrap(stock_forward(module))
    keywords = inspect.getfullargspec(forward).varkw
    if keywords is None or not takes_keywords(module):
        return False
    for instruction in get_instructions(forward.__code__):
        if instruction.opname.startswith("LOAD"):
            names = instruction.argval  # one name, or the two of a combined instruction
            if keywords in (names if isinstance(names, tuple) else (names,)):
                return True
    return False


def reads_earlier_keys(model: nn.Module) -> str | None:
    """Return the name of an attention layer that reads keys of an earlier layer; None without."""
    for name, module in decoder_attentions(base_model(model)).items():
        if getattr(module, "is_kv_shared_layer", False):
            return name
    return None


def trained_towers(model: PreTrainedModel) -> list[str]:
    """Return the trained parts of a model besides its text model and head, such as image towers."""
    if model.config.get_text_config(decoder=True) is model.config:
        return []
    text_ids: set[int] = set()  # of parameters
    for module in (
        text_decoder(model),
        model.get_input_embeddings(),
        model.get_output_embeddings(),
    ):
        if module is not None:
            text_ids.update(id(parameter) for parameter in module.parameters())
    towers: dict[str, None] = {}  # in the order of the model, each once
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in text_ids:
            tower = ".".join(name.split(".")[:2])
            towers[tower] = None
    return list(towers)


def text_trains_all(model: PreTrainedModel) -> bool:
    """Return whether text surely gives every trained parameter of a model a gradient.

    The model has no trained towers. Text does so in transformers' own models; in one of a user
    nobody knows. Two things may leave parameters out: layers that are skipped at random, and parts
    with a config of their own in a model that has no text model apart from them.
    """
    is_of_transformers = type(model).__module__.startswith("transformers.models.")
    text_config = model.config.get_text_config(decoder=True)
    skips_layers = any(value for name, value in vars(text_config).items() if "layerdrop" in name)
    has_unknown_parts = text_config is model.config and bool(model.config.sub_configs)
    return is_of_transformers and not skips_layers and not has_unknown_parts


def transposed_adapters(model: nn.Module) -> list[str]:
    """Return the names of trained weights that are transposed views.

    PEFT makes them for a LoRA of tied embeddings.
    """
    return [
        name
        for name, weight in model.named_parameters()
        if weight.requires_grad and not weight.is_contiguous()
    ]


def tied_in(model: Any, wrapper: str) -> list[str]:
    """Return the names of embeddings that share a weight and that PEFT wraps.

    Args:
        wrapper: name of PEFT's class around the embedding of the input or of the output.
    """
    if not getattr(model.config.get_text_config(decoder=True), "tie_word_embeddings", False):
        return []
    embeddings = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    return [
        name
        for name, module in model.named_modules()
        if id(module) in embeddings and type(module).__name__ == wrapper
    ]


def check_is_model(model: Any) -> None:
    """Raise ValueError unless an object is a loaded model that nothing has wrapped or compiled."""
    check_first(OBJECT, GivenModel(model))


def check_model(model: PreTrainedModel, *, ping_pong: bool = False) -> None:
    """Raise ValueError if a planned step of a model would be wrong.

    Args:
        model: a loaded model of transformers, or PEFT's around one, as `check_is_model` has it.
        ping_pong: whether the settings demand ping-pong.
    """
    for adapter in adapters_of(model):
        check_first(ADAPTERS, adapter)
    facts = ModelFacts(base_model(model), ping_pong=ping_pong)
    check_first(STRUCTURE, facts)
    check(SETTINGS, facts)
