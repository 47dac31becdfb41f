"""Whether packed documents that begin alike share rows in a training."""

from typing import Any

from transformers.utils.logging import get_logger

from hf_distca.models.decoder import base_model
from hf_distca.patches.padded import why_not_shared

logger = get_logger(__name__)

PACKAGES = ("hf_distca", "transformers", "trl")
"""Packages whose losses read nothing but labels and the hidden states or logits of their rows."""


def documents_share_rows(trainer: Any) -> bool:
    """Return whether documents that begin alike share rows.

    The first process logs once why not.
    """
    args = trainer.args
    reason = why_documents_stay_alone(trainer)
    if args.share_prefixes and reason is not None and args.process_index == 0:
        logger.info_once(f"equal beginnings of documents are not shared: {reason}")
    return bool(args.share_prefixes) and reason is None


def why_documents_stay_alone(trainer: Any) -> str | None:
    """Return why sharing rows among documents would change results; None if it would not."""
    args = trainer.args
    base = base_model(trainer.model)
    reason = why_not_shared(trainer.model)
    if reason is not None:
        return reason
    if args.attention_servers != 0:
        return "attention servers are only tried with the prefixes of padded batches"
    if getattr(args, "neftune_noise_alpha", None):
        return "the noise of neftune_noise_alpha is drawn for each row"
    # TRL asks for router logits by an argument of the forward.
    asks_router = getattr(base.config.get_text_config(), "output_router_logits", False)
    if asks_router or getattr(trainer, "aux_loss_enabled", False):
        return "the router's auxiliary loss counts rows; router_aux_loss_coef=0 leaves it out"
    if base.base_model is base:
        return f"{type(base).__name__} has no backbone apart from its head"
    losses = [vars(cls)["compute_loss"] for cls in type(trainer).__mro__ if _computes_loss(cls)]
    for loss in losses:
        if loss.__module__.partition(".")[0] not in PACKAGES:
            return f"{loss.__qualname__} may read labels and other columns of a row together"
    return None


def _computes_loss(cls: type) -> bool:
    """Return whether a class has a method `compute_loss` of its own."""
    return "compute_loss" in vars(cls)
