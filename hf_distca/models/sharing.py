"""Models and trainings whose results prefix sharing would change: they share no prefixes."""

import inspect
import re
from typing import Any

from torch import nn
from transformers.utils.logging import get_logger

from hf_distca.models.decoder import base_model, text_decoder
from hf_distca.models.mixing_modules import uncuttable
from hf_distca.models.rotary_types import rotary_modules

logger = get_logger(__name__)

DRAWN = re.compile("dropout|pdrop|drop_rate|jitter")
"""Fields of configs whose layers draw random numbers without a module: OPT's `dropout`, Mixtral's
`router_jitter_noise`."""
OF_OTHER_HEADS = re.compile("classifier|summary")
"""Fields of heads that the backbone does not have, such as GPT-2's `summary_first_dropout`."""
PACKAGES = ("hf_distca", "liger_kernel", "torch", "transformers", "trl")
"""Packages whose losses read nothing but labels and the hidden states or logits of their rows."""
ROUTER_COUNTS = "the router's auxiliary loss counts rows; router_aux_loss_coef=0 leaves it out"


def shares_prefixes(asked: bool, reason: str | None, rank: int) -> bool:
    """Return whether to share prefixes; rank 0 logs once why not.

    Args:
        asked: the setting `share_prefixes`.
        reason: why prefix sharing would change results; None if it would not.
    """
    if asked and reason is not None:
        log_no_sharing(reason, rank)
    return asked and reason is None


def log_no_sharing(reason: str, rank: int) -> None:
    """Log once, on rank 0, why no prefixes are shared."""
    if rank == 0:
        logger.info_once(f"prefixes are not shared: {reason}")


def why_sequences_share_nothing(model: nn.Module) -> str | None:
    """Return the reason why prefix sharing would change hidden states; None without one."""
    whole = uncuttable(model)
    if whole is not None:
        return f"documents of {type(whole).__name__} stay whole"
    if rotary_modules(base_model(model)):
        return "rotary embeddings depend on the length of each sequence"
    drawn = _drawn_for_each_row(model)
    if drawn is not None:
        return f"{drawn} draws random numbers for each row"
    return None


def why_documents_share_nothing(model: nn.Module) -> str | None:
    """Return the reason why prefix sharing would change a model's losses; None without one."""
    base = base_model(model)
    reason = why_sequences_share_nothing(model)
    if reason is not None:
        return reason
    if getattr(base.config.get_text_config(), "output_router_logits", False):
        return ROUTER_COUNTS
    if text_decoder(base) is base:
        return f"{type(base).__name__} has no decoder apart from its head"
    return why_not_row_by_row(type(base), "forward")


def why_training_shares_nothing(trainer: Any) -> str | None:
    """Return the reason why prefix sharing would change a training; None without one."""
    reason = why_documents_share_nothing(trainer.model)
    if reason is not None:
        return reason
    if getattr(trainer.args, "neftune_noise_alpha", None):
        return "the noise of neftune_noise_alpha is drawn for each row"
    # TRL asks for router logits by an argument of the forward.
    if getattr(trainer, "aux_loss_enabled", False):
        return ROUTER_COUNTS
    return why_not_row_by_row(type(trainer), "compute_loss")


def why_not_row_by_row(cls: type, method: str) -> str | None:
    """Return why a loss may need each target beside its row; None if it does not.

    With prefix sharing a row may have several targets, which are not beside the row.

    Args:
        method: name of the method that computes the loss.
    """
    for base in cls.__mro__:
        function = vars(base).get(method)
        if inspect.isroutine(function) and function.__module__.partition(".")[0] not in PACKAGES:
            return f"{function.__qualname__} may read targets and other columns of a row together"
    return None


def _drawn_for_each_row(model: nn.Module) -> str | None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            return f"the dropout {name}"
    return _drawn_by_config(base_model(model).config.get_text_config().to_dict())


def _drawn_by_config(settings: dict[str, Any]) -> str | None:
    for name, value in settings.items():
        if isinstance(value, dict):  # such as DBRX's settings of experts
            found = _drawn_by_config(value)
            if found is not None:
                return found
        is_positive = isinstance(value, float) and value > 0
        if is_positive and DRAWN.search(name) and not OF_OTHER_HEADS.search(name):
            return f"{name}={value}"
    return None
