"""Table of models and adapters that plans cannot train exactly."""

import inspect
import re
from dis import get_instructions
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from hf_distca.checks.refusal import Refusal, given_as
from hf_distca.models.checkpointing import CHECKPOINTING
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
from hf_distca.models.rotary import unknown_rotary_modules
from hf_distca.models.tensor_parallel import is_divided_at_load
from hf_distca.plan import ATTENTION_NAME

CHANGING_MASKS = ("doge",)
"""Model types whose layers derive a mask of their own from the given mask."""
IN_CONFIG = re.compile(r"(?!encoder_)(.*_)?(attn|attention)_.*drop.*")
"""Config fields: attention_dropout, attn_pdrop, attention_probs_dropout_prob,
decoder_attention_dropout_rate, ..."""
IN_MODULE = re.compile(r"(attn|attention)_.*drop.*|dropout(_p|_prob)?")
"""Attributes of an attention layer; there plain "dropout" also means dropout of the weights."""
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
STOCK = "train it with transformers' Trainer and stock attention (attn_implementation={stock})"
NO_DROPOUT = "ranks cannot draw the same dropped attention weights"
EARLIER_ROWS = "a plan supports attention to earlier rows only"


def _stock(condition: str, found: str, reason: str) -> Refusal:
    """Return the refusal of a model that can only be trained with stock attention."""
    return Refusal(found, reason, STOCK, condition=condition)


class Models:
    """What is refused in a model."""

    NOT_A_MODEL = Refusal(
        "model is {given}",
        "hf_distca changes the layers of a loaded model of transformers",
        f"pass AutoModelForCausalLM.from_pretrained(name, attn_implementation={ATTENTION_NAME!r})",
        condition="a config, a class, a path or a module of torch as the model",
    )
    WRAPPED = Refusal(
        "{model} is wrapped or compiled already, as {wrapper}",
        "hf_distca changes the model before that",
        "pass the model itself: call make_dispatcher, or make the trainer, before "
        "Accelerator.prepare, DDP, FSDP, DeepSpeed and torch.compile",
        condition="a model after `Accelerator.prepare`, DDP, FSDP, DeepSpeed or `torch.compile`",
    )
    NO_FORWARD = Refusal(
        "{model} has no forward",
        "it only holds several models, and training needs one of them",
        "load the model that computes text, such as Qwen2_5OmniThinkerForConditionalGeneration",
        condition="models that only hold several models (Qwen2.5-Omni, Qwen3-Omni)",
    )
    NO_INTERFACE = _stock(
        "no attention interface (models with attention code of their own)",
        "{model} does not run its attention through transformers' AttentionInterface, in modules "
        "of a class ...Attention with a layer_idx",
        "a plan reaches attention only there",
    )
    OTHER_ATTENTION = Refusal(
        "{model} runs attn_implementation={name!r}",
        "plans do not reach that attention",
        f"load it with attn_implementation={ATTENTION_NAME!r} or call "
        f"model.set_attn_implementation({ATTENTION_NAME!r})",
        condition=f"another `attn_implementation` than `{ATTENTION_NAME!r}`",
    )
    OWN_MASK = _stock(
        "layers that compute a mask of their own (Doge)",
        "the layers of {model} compute a custom mask from the values and add it to the causal mask",
        "a plan cannot express that mask",
    )
    DROPOUT_IN_CONFIG = Refusal(
        "{name} is {value}",
        NO_DROPOUT,
        "load the model with {name}=0.0",
        condition="attention dropout (`attention_dropout`, GPT-2's `attn_pdrop`)",
    )
    DROPOUT_IN_LAYER = Refusal(
        "{name} of {layer} is {value}",
        NO_DROPOUT,
        "set it to 0.0 in every attention layer",
        condition="attention dropout in a layer",
    )
    NO_POSITIONS = _stock(
        "no `position_ids` (decoders of BART, Marian, Pegasus)",
        "{model} takes no position_ids",
        "it counts the positions of a whole row, and packed documents need positions that restart "
        "at 0",
    )
    POSITIONS_FROM_PADDING = _stock(
        "positions counted from the padding token (RoBERTa)",
        "{module} of {model} counts positions from its padding token",
        "packed documents need positions that begin at 0",
    )
    LONGEST_POSITION = _stock(
        "rotary embeddings that read the longest position in code of their own (longrope or "
        "dynamic NTK outside transformers)",
        "{module} of {model} has a rotary embedding that depends on the longest position of a row, "
        "or on the row's length",
        "a packed row holds many documents or a part of one, and how to compute it for each "
        "document is unknown",
    )
    NOT_CAUSAL = _stock(
        "attention that is not causal, or to an encoder (PaliGemma, BERT, Whisper)",
        "{module} of {model} is not causal: its rows attend to later rows or to an encoder's",
        EARLIER_ROWS,
    )
    NOT_DECODER = Refusal(
        "{module} of {model} is not causal: its rows attend to later rows",
        EARLIER_ROWS,
        f"set is_decoder=True in its config, or {STOCK}",
        condition="models that can be decoders, with `is_decoder=False` (BERT)",
    )
    BIAS = _stock(
        "biases added to attention scores (Inkling)",
        "{module} of {model} adds a bias to its scores (position_bias) for each pair of a query "
        "and a key",
        "a plan does not exchange biases",
    )
    UNKNOWN_MIXING = _stock(
        "layers of unknown types that mix the rows of a document (indexers, n-gram embeddings)",
        "{config} has {expected} layers of the types {types}, and only in {known} of them a module "
        "is known that mixes along the row (with a convolution, or attention of its own)",
        "documents could not be kept apart in the others",
    )
    MIXING_WITHOUT_KEYWORDS = _stock(
        "such layers without `**kwargs`",
        "{module}.forward has no **kwargs",
        "the plan would not reach the module in it that mixes along the row, and documents "
        "would mix",
    )
    DROPS_KEYWORDS = _stock(
        "keywords are dropped on the way to attention or to the loss (StableLM, Nemotron)",
        "{model} drops keywords on the way to its attention or its loss: {module}.forward takes "
        "none, or does not use them",
        "the plan and the number of targets are such keywords",
    )
    OTHER_LOSS = Refusal(
        "{model} computes transformers' loss {loss}",
        "labels of packed documents are their next tokens: no classes, answers or hidden tokens",
        "load the model with AutoModelForCausalLM; or train it with transformers' Trainer and "
        "attn_implementation='sdpa'",
        condition=(
            "classifiers and other models without a language model's loss "
            "(`LlamaForSequenceClassification`)"
        ),
    )
    OWN_LOSS = _stock(
        "a loss without transformers' loss function (`GPT2ForTokenClassification`)",
        "{model} does not use transformers' loss function and takes the mean over its own rows",
        "ranks with different numbers of targets would have no exact loss",
    )
    MEAN_OF_ROWS = Refusal(
        "{model} adds a mean over the rows of a rank to its loss ({name}={value})",
        "ranks have different numbers of rows, and their means would be added up",
        "set {name} to 0 in the config before you load the model",
        condition="a loss of logits beside cross entropy (Bamba's `z_loss_coefficient`)",
    )
    CUT_MIXING = Refusal(
        "document_layout={layout!r} cuts documents",
        "{module} in {model} mixes the rows of a document other than by attention, and would be "
        "wrong for a document that is cut",
        "set document_layout='whole', which 'auto' means for this model",
        condition=(
            '`document_layout="joint"` or `"fixed"` with Mamba-1 or a recurrence that is not known'
        ),
    )
    CHECKPOINT_INSIDE = Refusal(
        "{module} runs in a gradient checkpoint that begins inside its decoder layer",
        "recomputation would lack the layer's plan and mix documents",
        f"put checkpoints around whole layers, as model.{CHECKPOINTING}_enable() does",
        condition="checkpoints that begin inside a decoder layer with such a module",
    )
    NO_LAYERS = Refusal(
        "{model} has no decoder layer based on transformers' GradientCheckpointingLayer",
        "ping-pong needs such layers",
        "set ping_pong=False",
        condition="`ping_pong=True` without decoder layers of transformers' kind",
    )
    REENTRANT = Refusal(
        "{module} reads the keys and values of an earlier layer",
        "a reentrant checkpoint passes no gradient back to them",
        f"set {CHECKPOINTING}_kwargs={{{{'use_reentrant': False}}}}",
        condition="reentrant checkpoints of layers that share keys and values (Gemma 3n, Gemma 4)",
    )


def _adapter(condition: str, reason: str) -> Refusal:
    """Return the refusal of a type of PEFT's adapters."""
    return Refusal(
        "adapter {name!r} is of the type {kind}",
        reason,
        "use an adapter that processes each token alone, such as LoRA; or train with "
        "attn_implementation='sdpa' and transformers' Trainer",
        condition=condition,
    )


MANY_DOCUMENTS = "a packed row holds many documents or a part of one"
PROMPT_LEARNING = _adapter(
    "prompt tuning, prefix tuning, p-tuning",
    f"it puts virtual tokens before the rows of a batch, and {MANY_DOCUMENTS}",
)
ALORA = _adapter(
    "aLoRA (`alora_invocation_tokens`)",
    f"it begins behind the last invocation tokens of a row, and {MANY_DOCUMENTS}",
)
ADAPTERS = {
    "ADALORA": _adapter(
        "AdaLoRA",
        "it adds a penalty to the loss of every micro-batch on every rank, which would count many "
        "times",
    ),
    "SHADOW": _adapter(
        "ShadowPEFT",
        "it adds the loss of a second decoder, which takes targets for unshifted labels",
    ),
    "LILY": _adapter(
        "Lily",
        "it averages its routers over all rows of a rank, so that documents would change one "
        "another",
    ),
    "POLY": _adapter(
        "Poly", "it needs task_ids with every example, which packed rows do not carry"
    ),
}
"""Refused types of PEFT's adapters."""


def check_is_model(model: Any) -> None:
    """Raise ValueError unless an object is a loaded model that nothing has wrapped or compiled.

    It is a model of transformers, or PEFT's around one.
    """
    if not isinstance(model, nn.Module):
        raise Models.NOT_A_MODEL.error(given=given_as(model))
    model_class = type(model)
    if _is_wrapper(model):
        inner = getattr(model, "module", None) or getattr(model, "_orig_mod", model)
        raise Models.WRAPPED.error(model=type(inner).__name__, wrapper=model_class.__name__)
    if model._compiled_call_impl is not None:
        raise Models.WRAPPED.error(model=model_class.__name__, wrapper="model.compile() does")
    base = base_model(model)
    if not isinstance(base, PreTrainedModel):
        raise Models.NOT_A_MODEL.error(given=given_as(model))
    if type(base).forward is nn.Module.forward:
        raise Models.NO_FORWARD.error(model=type(base).__name__)


def _is_wrapper(model: nn.Module) -> bool:
    """Return whether a module is a model that DDP, FSDP, DeepSpeed or torch.compile has wrapped."""
    # FSDP2 gives a model another class, which torch makes. A model that transformers divided at
    # load has such a class, too, and can be planned.
    if isinstance(model, FSDPModule):
        return not is_divided_at_load(model)
    return type(model).__module__.startswith(WRAPPERS)


def check_loss(model: nn.Module) -> None:
    """Raise ValueError if transformers does not compute a model's loss from the next tokens."""
    base: Any = base_model(model)
    loss = getattr(base, "loss_type", None) or "ForCausalLM"
    if LOSS_MAPPING.get(loss, ForCausalLMLoss) is not ForCausalLMLoss:
        raise Models.OTHER_LOSS.error(model=type(base).__name__, loss=loss)


def check_model(model: PreTrainedModel) -> None:
    """Raise ValueError if a planned step of a model would be wrong.

    The model is one of transformers, or PEFT's around one.
    """
    check_is_model(model)
    _check_adapters(model)
    base = base_model(model)
    facts = _ModelFacts(base)
    _check_attention_interface(facts)
    _check_dropout(facts)
    _check_positions(facts)
    if getattr(base, Z_LOSS, 0.0) > 0:
        raise Models.MEAN_OF_ROWS.error(**facts.texts, name=Z_LOSS, value=getattr(base, Z_LOSS))
    _check_causality(facts)
    _check_mixing_layers(facts)
    _check_keywords(facts)
    _check_loss_function(facts)


class _ModelFacts:
    """A model's modules, and its name in errors.

    Attributes:
        config: config of the model's text part.
        attentions: attention layers of the decoder by name.
        texts: for errors: the class of the model, and the attention with which it can be trained
            without plans.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config: Any = model.config.get_text_config(decoder=True)
        self.decoder = text_decoder(model)
        self.attentions = decoder_attentions(model)
        stock = ["eager"]
        for implementation, flag in STOCK_ATTENTION.items():
            if getattr(model, flag, False):
                stock.append(implementation)
        self.texts = {"model": type(model).__name__, "stock": " or ".join(map(repr, stock))}


def _check_adapters(model: nn.Module) -> None:
    """Raise ValueError if an adapter of PEFT does not process each token alone."""
    for name, adapter in getattr(model, "peft_config", {}).items():
        refusal = ADAPTERS.get(adapter.peft_type)
        if adapter.is_prompt_learning:
            refusal = PROMPT_LEARNING
        elif getattr(adapter, "alora_invocation_tokens", None):
            refusal = ALORA
        if refusal is not None:
            kind = getattr(adapter.peft_type, "value", adapter.peft_type)
            raise refusal.error(name=name, kind=kind)


def _check_attention_interface(facts: _ModelFacts) -> None:
    """Raise ValueError if a plan would not reach the model's attention."""
    if not facts.attentions:
        raise Models.NO_INTERFACE.error(**facts.texts)
    implementation = facts.config._attn_implementation
    if implementation != ATTENTION_NAME:
        raise Models.OTHER_ATTENTION.error(**facts.texts, name=implementation)
    if facts.config.model_type in CHANGING_MASKS:
        raise Models.OWN_MASK.error(**facts.texts)


def _check_dropout(facts: _ModelFacts) -> None:
    """Raise ValueError if the config or an attention layer drops attention weights."""
    for name, value in facts.config.to_dict().items():
        if IN_CONFIG.fullmatch(name) and _probability(value) > 0:
            raise Models.DROPOUT_IN_CONFIG.error(name=name, value=value)
    for layer, attention in facts.attentions.items():
        for name, value in (*vars(attention).items(), *attention.named_children()):
            if not IN_MODULE.fullmatch(name):
                continue
            probability = _probability(value)
            if probability > 0:
                raise Models.DROPOUT_IN_LAYER.error(name=name, layer=layer, value=probability)


def _check_positions(facts: _ModelFacts) -> None:
    """Raise ValueError if the model would compute wrong positions for packed documents."""
    model = facts.model
    modules: list[Any] = [model]
    if takes_keywords(model):  # and passes them on to its decoder
        modules.append(facts.decoder)
    if not any("position_ids" in inspect.signature(m.forward).parameters for m in modules):
        raise Models.NO_POSITIONS.error(**facts.texts)
    for name, module in model.named_modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            raise Models.POSITIONS_FROM_PADDING.error(**facts.texts, module=name)
    for rotary in unknown_rotary_modules(model):
        raise Models.LONGEST_POSITION.error(**facts.texts, module=rotary)


def _check_causality(facts: _ModelFacts) -> None:
    """Raise ValueError if rows attend to later rows, or if biases are added to their scores."""
    config = facts.config
    not_causal = Models.NOT_CAUSAL if getattr(config, "is_decoder", True) else Models.NOT_DECODER
    for name, attention in facts.attentions.items():
        # A config that is not causal makes masks that are not, whatever the modules say.
        if not (getattr(config, "is_causal", True) and getattr(attention, "is_causal", True)):
            raise not_causal.error(**facts.texts, module=name)
        if hands_on(attention, "position_bias"):
            raise Models.BIAS.error(**facts.texts, module=name)


def _check_mixing_layers(facts: _ModelFacts) -> None:
    """Raise ValueError if a layer mixes rows in a way that cannot be planned.

    The way is unknown, or the plan does not reach it.
    """
    layers = mixing_layers(facts.model)
    expected = sum(layer_type in MIXING for layer_type in layer_types(facts.config))
    if len(layers) < expected:
        raise Models.UNKNOWN_MIXING.error(
            **facts.texts,
            config=type(facts.config).__name__,
            expected=expected,
            types=list(MIXING),
            known=len(layers),
        )
    for layer in layers:
        if not takes_keywords(layer):
            raise Models.MIXING_WITHOUT_KEYWORDS.error(**facts.texts, module=type(layer).__name__)


def _check_keywords(facts: _ModelFacts) -> None:
    """Raise ValueError if a module drops keywords on the way to attention or to the loss.

    The plan and the number of targets are such keywords.
    """
    layers = [layer for layer in decoder_layers(facts.model) if has_attention(layer)]
    around = (facts.decoder, backbone(facts.model), facts.model)
    for module in (*facts.attentions.values(), *layers, *around):
        if not _hands_keywords_on(module):
            raise Models.DROPS_KEYWORDS.error(**facts.texts, module=type(module).__name__)


def _check_loss_function(facts: _ModelFacts) -> None:
    """Raise ValueError if a model of transformers computes a loss without its loss function."""
    forward = inspect.unwrap(type(facts.model).forward)
    computes_loss = "labels" in inspect.signature(forward).parameters
    is_stock = forward.__module__.startswith("transformers.")
    if computes_loss and is_stock and "loss_function" not in forward.__code__.co_names:
        raise Models.OWN_LOSS.error(**facts.texts)


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


def check_layers(model: PreTrainedModel) -> None:
    """Raise ValueError if a model has no layers in which two nano-batches can take turns."""
    if not decoder_layers(model):
        raise Models.NO_LAYERS.error(model=type(model).__name__)


def check_reentrant(model: nn.Module) -> None:
    """Raise ValueError if reentrant checkpoints would lose gradients of keys.

    These are keys that later layers read.
    """
    for name, module in decoder_attentions(base_model(model)).items():
        if getattr(module, "is_kv_shared_layer", False):
            raise Models.REENTRANT.error(module=name)
