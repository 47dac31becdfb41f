"""Models by name or config, with planned attention in the decoder of their text.

Towers for images or sound keep their own attention: no plan reaches them.
"""

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from hf_distca.models.decoder import base_model
from hf_distca.plan import ATTENTION_NAME

logger = logging.getLogger(__name__)

FOR_CONFIG = (
    *("cache_dir", "code_revision", "local_files_only", "revision", "subfolder", "token"),
    "trust_remote_code",
)
"""Arguments of `from_pretrained` that say where the config of a model is."""


def load_model(name: str, options: Mapping[str, Any]) -> PreTrainedModel:
    """Load a causal language model, with its towers if its checkpoint has any.

    Args:
        options: arguments of `from_pretrained`.
    """
    config = _config_of(name, options)
    auto: Any = AutoModelForCausalLM if config is None else auto_class(config)
    model: PreTrainedModel = auto.from_pretrained(name, **{"dtype": "float32", **options})
    return model


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the auto class that makes the model of a config, with its towers if it has any.

    Some types have a class for text alone, too. `architectures` says which class was saved.
    """
    multimodal = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(config.model_type)
    is_of_text = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    was_saved = multimodal in (config.architectures or ())
    if multimodal is not None and (was_saved or not is_of_text):
        return AutoModelForMultimodalLM
    return AutoModelForCausalLM


def attention_of(config: PreTrainedConfig) -> str | dict[str, str]:
    """Return `attn_implementation` for a model of a config."""
    text = config.get_text_config(decoder=True)
    for part in config.sub_configs:
        if getattr(config, part, None) is text:
            return {"": ATTENTION_NAME, part: ATTENTION_NAME}
    return ATTENTION_NAME


def plan_attention(model: PreTrainedModel) -> None:
    """Let a loaded model use planned attention in place of another."""
    base = base_model(model)
    text = base.config.get_text_config(decoder=True)
    other = text._attn_implementation
    if other != ATTENTION_NAME:
        base.set_attn_implementation(attention_of(base.config))
        logger.info("attn_implementation=%r is now %r", other, ATTENTION_NAME)


def _config_of(name: str, options: Mapping[str, Any]) -> PreTrainedConfig | None:
    """Return the config of a model; None where loading the model will say what is wrong.

    The folder of an adapter has no config either.
    """
    places = {key: value for key, value in options.items() if key in FOR_CONFIG}
    with suppress(OSError, ValueError):
        config: PreTrainedConfig = AutoConfig.from_pretrained(name, **places)
        return config
    return None
