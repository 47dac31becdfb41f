"""Rules of models and adapters that plans cannot train exactly.

A rule reads facts of a model, see `hf_distca.models.model_facts`.
"""

from collections.abc import Callable
from typing import Any

from hf_distca.checks.refusal import Refusal, Rule
from hf_distca.checks.setting_names import CHECKPOINTING

DISTCA = "attn_implementation='distca'"
STOCK = "train it with transformers' Trainer and stock attention (attn_implementation={0.stock})"
NO_DROPOUT = "ranks cannot draw the same dropped attention weights"
EARLIER_ROWS = "a plan supports attention to earlier rows only"


def _stock(condition: str, found: str, reason: str, when: Callable[[Any], object]) -> Rule:
    """Return the rule of a model that can only be trained with stock attention."""
    return Rule(found, reason, STOCK, when, condition=condition)


class Models:
    """What is refused in a model."""

    NOT_A_MODEL = Rule(
        "model is {0.given}",
        "hf_distca changes the layers of a loaded model of transformers",
        f"pass AutoModelForCausalLM.from_pretrained(name, {DISTCA})",
        lambda facts: not facts.is_model,
        condition="a config, a class, a path or a module of torch as the model",
    )
    WRAPPED = Rule(
        "{0.wrapped} is wrapped or compiled already, as {0.wrapper}",
        "hf_distca changes the model before that",
        "pass the model itself: call make_dispatcher, or make the trainer, before "
        "Accelerator.prepare, DDP, FSDP, DeepSpeed and torch.compile",
        lambda facts: facts.wrapper is not None,
        condition="a model after `Accelerator.prepare`, DDP, FSDP, DeepSpeed or `torch.compile`",
    )
    NO_FORWARD = Rule(
        "{0.model} has no forward",
        "it only holds several models, and training needs one of them",
        "load the model that computes text, such as Qwen2_5OmniThinkerForConditionalGeneration",
        lambda facts: not facts.has_forward,
        condition="models that only hold several models (Qwen2.5-Omni, Qwen3-Omni)",
    )
    NO_INTERFACE = _stock(
        "no attention interface (models with attention code of their own)",
        "{0.model} does not run its attention through transformers' AttentionInterface, in modules "
        "of a class ...Attention with a layer_idx",
        "a plan reaches attention only there",
        lambda facts: not facts.attentions,
    )
    OWN_MASK = _stock(
        "layers that compute a mask of their own (Doge)",
        "the layers of {0.model} compute a custom mask from the values and add it to the causal "
        "mask",
        "a plan cannot express that mask",
        lambda facts: facts.has_own_mask,
    )
    DROPOUT_IN_CONFIG = Rule(
        "{0.config_dropout.name} is {0.config_dropout.value}",
        NO_DROPOUT,
        "load the model with {0.config_dropout.name}=0.0",
        lambda facts: facts.config_dropout is not None,
        condition="attention dropout (`attention_dropout`, GPT-2's `attn_pdrop`)",
    )
    DROPOUT_IN_LAYER = Rule(
        "{0.layer_dropout.name} of {0.layer_dropout.layer} is {0.layer_dropout.value}",
        NO_DROPOUT,
        "set it to 0.0 in every attention layer",
        lambda facts: facts.layer_dropout is not None,
        condition="attention dropout in a layer",
    )
    LAYERDROP = Rule(
        "{0.layerdrop.name} is {0.layerdrop.value}",
        "ranks would skip different layers, but they exchange core attention within one layer",
        "load the model with {0.layerdrop.name}=0.0",
        lambda facts: facts.layerdrop is not None,
        condition="layers that are skipped at random (`layerdrop` of OPT and BioGPT)",
    )
    NO_POSITIONS = _stock(
        "no `position_ids` (decoders of BART, Marian, Pegasus)",
        "{0.model} takes no position_ids",
        "it counts the positions of a whole row, and packed documents need positions that restart "
        "at 0",
        lambda facts: not facts.takes_positions,
    )
    POSITIONS_FROM_PADDING = _stock(
        "positions counted from the padding token (RoBERTa)",
        "{0.padding_positions} of {0.model} counts positions from its padding token",
        "packed documents need positions that begin at 0",
        lambda facts: facts.padding_positions is not None,
    )
    LONGEST_POSITION = _stock(
        "rotary embeddings that read the longest position in code of their own (longrope or "
        "dynamic NTK outside transformers)",
        "{0.unknown_rotary} of {0.model} has a rotary embedding that depends on the longest "
        "position of a row, or on the row's length",
        "a packed row holds many documents or a part of one, and how to compute it for each "
        "document is unknown",
        lambda facts: facts.unknown_rotary is not None,
    )
    NOT_CAUSAL = _stock(
        "attention that is not causal, or to an encoder (PaliGemma, BERT, Whisper)",
        "{0.not_causal} of {0.model} is not causal: its rows attend to later rows or to an "
        "encoder's",
        EARLIER_ROWS,
        lambda facts: facts.not_causal is not None and facts.is_decoder,
    )
    NOT_DECODER = Rule(
        "{0.not_causal} of {0.model} is not causal: its rows attend to later rows",
        EARLIER_ROWS,
        f"set is_decoder=True in its config, or {STOCK}",
        lambda facts: facts.not_causal is not None and not facts.is_decoder,
        condition="models that can be decoders, with `is_decoder=False` (BERT)",
    )
    BIAS = _stock(
        "biases added to attention scores (Inkling)",
        "{0.biased} of {0.model} adds a bias to its scores (position_bias) for each pair of a "
        "query and a key",
        "a plan does not exchange biases",
        lambda facts: facts.biased is not None,
    )
    UNKNOWN_MIXING = _stock(
        "layers of unknown types that mix the rows of a document (indexers, n-gram embeddings)",
        "{0.config_class} has {0.expected_mixing} layers of the types {0.mixing_types}, and only "
        "in {0.known_mixing} of them a module is known that mixes along the row (with a "
        "convolution, or attention of its own)",
        "documents could not be kept apart in the others",
        lambda facts: facts.known_mixing < facts.expected_mixing,
    )
    MIXING_WITHOUT_KEYWORDS = _stock(
        "such layers without `**kwargs`",
        "{0.unplanned_mixing}.forward has no **kwargs",
        "the plan would not reach the module in it that mixes along the row, and documents "
        "would mix",
        lambda facts: facts.unplanned_mixing is not None,
    )
    DROPS_KEYWORDS = _stock(
        "keywords are dropped on the way to attention or to the loss (StableLM, Nemotron)",
        "{0.model} drops keywords on the way to its attention or its loss: "
        "{0.drops_keywords}.forward takes none, or does not use them",
        "the plan and the number of targets are such keywords",
        lambda facts: facts.drops_keywords is not None,
    )
    OTHER_LOSS = Rule(
        "{0.model} computes transformers' loss {0.loss}",
        "labels of packed documents are their next tokens: no classes, answers or hidden tokens",
        "load the model with AutoModelForCausalLM; or train it with transformers' Trainer and "
        "attn_implementation='sdpa'",
        lambda facts: facts.loss is not None,
        condition=(
            "classifiers and other models without a language model's loss "
            "(`LlamaForSequenceClassification`)"
        ),
    )
    READS_PADDING = Rule(
        "{0.model} computes transformers' loss {0.loss}",
        "it compares all columns of a padded batch, and hidden states of padding are 0 where "
        "padding is not computed",
        "train it with transformers' Trainer and attn_implementation='sdpa'",
        lambda facts: facts.loss == "ForQuestionAnswering",
        condition="heads that choose a column of a padded batch (`LlamaForQuestionAnswering`)",
    )
    OWN_LOSS = _stock(
        "a loss without transformers' loss function (`GPT2ForTokenClassification`)",
        "{0.model} does not use transformers' loss function and takes the mean over its own rows",
        "ranks with different numbers of targets would have no exact loss",
        lambda facts: facts.has_own_loss,
    )
    MEAN_OF_ROWS = Rule(
        "{0.model} adds a mean over the rows of a rank to its loss "
        "({0.mean_of_rows.name}={0.mean_of_rows.value})",
        "ranks have different numbers of rows, and their means would be added up",
        "set {0.mean_of_rows.name} to 0 in the config before you load the model",
        lambda facts: facts.mean_of_rows is not None,
        condition="a loss of logits beside cross entropy (Bamba's `z_loss_coefficient`)",
    )
    NO_HEADS = Refusal(
        "{config} has no num_attention_heads",
        "the heads of {attention} must be known to plan its attention",
        "train this model with stock attention and transformers' Trainer",
    )
    UNKNOWN_LAYERS = Refusal(
        "{config} has layers of type {types}",
        "a planned step is exact only for layers of the types {known}",
        "choose a model with these types only, or train this model with stock attention and "
        "transformers' Trainer",
        condition="layers of unknown types (sparse attention with an indexer)",
    )
    UNDIVIDED_HEADS = Refusal(
        "{name} has {heads} {kind}",
        "tensor parallelism cannot divide them among {ranks} ranks",
        "load {model} with a tp_size that divides {q_heads} and {kv_heads}; raise fsdp_size to use "
        "the other ranks: DistributedConfig(tp_size=…, fsdp_size=…)",
        condition="a `tp_size` that does not divide the query heads and the key-value heads",
    )
    NO_MLPS = Refusal(
        "mlp_chunk_rows={rows} has no effect on the decoder layers of {model}",
        "{reasons}",
        "set mlp_chunk_rows=0",
        condition="`mlp_chunk_rows` where no MLP of the model can be computed in chunks",
    )
    CUT_MIXING = Refusal(
        "document_layout={layout!r} cuts documents",
        "{module} in {model} mixes the rows of a document other than by attention, and would be "
        "wrong for a document that is cut",
        "set document_layout='whole', which 'auto' means for this model",
        condition='`document_layout="fixed"` with Mamba-1 or a recurrence that is not known',
    )
    CHECKPOINT_INSIDE = Refusal(
        "{module} runs in a gradient checkpoint that begins inside its decoder layer",
        "recomputation would lack the layer's plan and mix documents",
        f"put activation checkpoints around whole layers, as model.{CHECKPOINTING}_enable() does",
        condition="activation checkpoints that begin inside a decoder layer with such a module",
    )
    NO_LAYERS = Rule(
        "{0.model} has no decoder layer based on transformers' GradientCheckpointingLayer",
        "ping-pong needs such layers",
        "set planning={{'ping_pong': False}}",
        lambda facts: facts.asks_for_ping_pong and not facts.has_layers,
        condition="`planning={'ping_pong': True}` without decoder layers of transformers' kind",
    )


def _adapter(condition: str, reason: str, when: Callable[[Any], object]) -> Rule:
    """Return the rule of a type of PEFT's adapters."""
    return Rule(
        "adapter {0.name!r} is of the type {0.kind}",
        reason,
        "use an adapter that processes each token alone, such as LoRA; or train with "
        "attn_implementation='sdpa' and transformers' Trainer",
        when,
        condition=condition,
    )


MANY_DOCUMENTS = "a packed row holds many documents or a part of one"
ADAPTERS: tuple[Rule, ...] = (
    _adapter(
        "prompt tuning, prefix tuning, p-tuning",
        f"it puts virtual tokens before the rows of a batch, and {MANY_DOCUMENTS}",
        lambda adapter: adapter.is_prompt_learning,
    ),
    _adapter(
        "aLoRA (`alora_invocation_tokens`)",
        f"it begins behind the last invocation tokens of a row, and {MANY_DOCUMENTS}",
        lambda adapter: adapter.is_alora,
    ),
    _adapter(
        "`module_dropout` above 0 (LoHa, LoKr, OFT, DeLoRA)",
        f"it leaves the adapter out of whole calls at random, and {MANY_DOCUMENTS}",
        lambda adapter: adapter.module_dropout > 0,
    ),
    _adapter(
        "AdaLoRA",
        "it adds a penalty to the loss of every micro-batch on every rank, which would count many "
        "times",
        lambda adapter: adapter.kind == "ADALORA",
    ),
    _adapter(
        "ShadowPEFT",
        "it adds the loss of a second decoder, which takes targets for unshifted labels",
        lambda adapter: adapter.kind == "SHADOW",
    ),
    _adapter(
        "Lily",
        "it averages its routers over all rows of a rank, so that documents would change one "
        "another",
        lambda adapter: adapter.kind == "LILY",
    ),
)
"""Adapters of PEFT, each with its name and type."""
OBJECT: tuple[Rule, ...] = (Models.WRAPPED, Models.NOT_A_MODEL)
"""Rules of what is given as a model. Each rests on those before, so that the first one counts."""
STRUCTURE: tuple[Rule, ...] = (
    Models.NO_FORWARD,
    Models.NO_INTERFACE,
    Models.OWN_MASK,
    Models.NO_POSITIONS,
    Models.POSITIONS_FROM_PADDING,
    Models.LONGEST_POSITION,
    Models.NOT_CAUSAL,
    Models.NOT_DECODER,
    Models.BIAS,
    Models.UNKNOWN_MIXING,
    Models.MIXING_WITHOUT_KEYWORDS,
    Models.DROPS_KEYWORDS,
    Models.OWN_LOSS,
)
"""Rules of a model that no setting makes trainable. The first one is reason enough."""
SETTINGS: tuple[Rule, ...] = (
    Models.DROPOUT_IN_CONFIG,
    Models.DROPOUT_IN_LAYER,
    Models.LAYERDROP,
    Models.MEAN_OF_ROWS,
    Models.NO_LAYERS,
)
"""Rules of a model that trains with other settings. All of them are listed at once."""
