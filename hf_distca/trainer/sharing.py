"""Why packed documents that begin alike are each computed alone in a training."""

from typing import Any

from hf_distca.models.sharing import ROUTER_COUNTS, why_documents_stay_alone, why_not_row_by_row


def why_alone_in(trainer: Any) -> str | None:
    """Return the reason why prefix sharing would change a training; None if there is no reason."""
    reason = why_documents_stay_alone(trainer.model)
    if reason is not None:
        return reason
    if getattr(trainer.args, "neftune_noise_alpha", None):
        return "the noise of neftune_noise_alpha is drawn for each row"
    # TRL asks for router logits by an argument of the forward.
    if getattr(trainer, "aux_loss_enabled", False):
        return ROUTER_COUNTS
    return why_not_row_by_row(type(trainer), "compute_loss")
