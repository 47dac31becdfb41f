"""Check for PEFT adapters that a planned step would compute wrongly."""

from typing import Any

from torch import nn

_REASONS = {
    "ADALORA": "adds a penalty to the loss of every micro-batch on every rank, so that it would count many times",
    "SHADOW": "adds the loss of a second decoder, which takes targets for unshifted labels",
    "LILY": "averages its routers over all rows of a rank, so that documents would change one another",
    "POLY": "needs task_ids with every example, which packed rows do not carry",
}


def check_adapters(model: nn.Module) -> None:
    """Raise if an adapter's result would be wrong for packed documents that are cut.

    Args:
        model: a transformers model or a PEFT model around one.

    Raises:
        ValueError: an adapter adds virtual tokens (prompt tuning, prefix tuning, p-tuning), starts at invocation
            tokens (aLoRA), or is AdaLoRA, ShadowPEFT, Lily or Poly.
    """
    for name, config in getattr(model, "peft_config", {}).items():
        if reason := _reason(config):
            kind = getattr(config.peft_type, "value", config.peft_type)
            raise ValueError(
                f"adapter {name!r} ({kind}) {reason}; use one that acts on each token alone, such as LoRA, or train "
                "without planned attention"
            )


def _reason(config: Any) -> str | None:
    if config.is_prompt_learning:
        return "puts virtual tokens before the rows of a batch, but a packed row holds many documents or a part of one"
    if getattr(config, "alora_invocation_tokens", None):
        return (
            "begins behind the last invocation tokens of a row (alora_invocation_tokens), but a packed row holds many "
            "documents or a part of one"
        )
    return _REASONS.get(config.peft_type)
