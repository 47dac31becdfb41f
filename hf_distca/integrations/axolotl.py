"""Plugin of axolotl: fine-tuning and DPO with planned core attention, from a YAML file.

axolotl imports this file to read the configuration, long before it imports its trainers, so they
are in a file of their own.
"""

from dataclasses import fields
from typing import Any

from hf_distca.checks.integration_rules import AXOLOTL
from hf_distca.checks.refusal import PackageError, check
from hf_distca.config import DistCAConfig

try:
    from axolotl.integrations.base import BasePlugin
    from axolotl.utils.logging import get_logger
    from pydantic import BaseModel, create_model
except ModuleNotFoundError as error:
    if error.name not in ("axolotl", "pydantic"):
        raise
    raise PackageError(
        "DistCAPlugin is a plugin of axolotl, which is not installed; run pip install axolotl"
    ) from error

logger = get_logger(__name__)

TRAINERS = "hf_distca.integrations.axolotl_trainers"
"""Module with the trainers, which axolotl imports when it builds one."""
SETTINGS = tuple(setting.name for setting in fields(DistCAConfig))
"""Settings of hf_distca that the YAML file may have."""
ATTENTION = (
    "attn_implementation",
    "eager_attention",
    "flash_attention",
    "flex_attention",
    "sage_attention",
    "sdp_attention",
    "xformers_attention",
)
"""Keys that choose the attention. Planned core attention takes its place."""
PACKING = ("sample_packing", "eval_sample_packing", "batch_flattening", "pad_to_sequence_len")
"""Keys that pack and pad documents. hf_distca packs them."""
WARMUP_RATIO = 0.03
"""Share of the steps that axolotl warms up for by default."""

_optional: dict[str, Any] = dict.fromkeys(SETTINGS, (Any, None))
DistCAInputArgs: type[BaseModel] = create_model("DistCAInputArgs", **_optional)
"""Schema of the settings in the YAML file. `DistCAConfig` checks their values."""


class DistCAPlugin(BasePlugin):
    """Plugin of axolotl that plans core attention.

    ```yaml
    plugins:
      - hf_distca.integrations.axolotl.DistCAPlugin
    tokens_per_rank: 32k
    ```

    The YAML file may have every setting of `DistCAConfig`. Documents are packed by hf_distca. With
    `rl: dpo` or `rl: ipo` the padded batches of axolotl are computed packed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._packs = True

    def register(self, cfg: Any) -> None:
        """Check the configuration, and leave out what hf_distca does itself.

        Args:
            cfg: the YAML file, before axolotl reads it.
        """
        check(AXOLOTL, cfg)
        self._packs = not cfg.get("rl")
        others = (*ATTENTION, "activation_offloading", *(PACKING if self._packs else ()))
        left_out = [f"{name}: {cfg[name]}" for name in others if cfg.get(name)]
        if left_out:
            logger.warning("No effect with hf_distca: %s", ", ".join(left_out))
        for name in others:
            cfg[name] = None
        if self._packs:
            cfg["sample_packing"] = False

    def get_input_args(self) -> str:
        """Return the name of the schema of the settings."""
        return f"{__name__}.{DistCAInputArgs.__name__}"

    def get_training_args_mixin(self) -> str:
        """Return the name of the class that adds the settings to axolotl's arguments."""
        name = "DistCAArguments" if self._packs else "DistCAPaddedArguments"
        return f"hf_distca.trainer.arguments.{name}"

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        """Return the settings, and arguments that depend on what a step holds.

        axolotl counts steps by examples. Packed documents have fewer, so transformers counts them.
        """
        given = {name: cfg[name] for name in SETTINGS if cfg[name] is not None}
        if not self._packs:
            return given
        counted = {"max_steps": cfg.max_steps or -1, "average_tokens_across_devices": True}
        if cfg.warmup_steps is None:
            ratio = cfg.warmup_ratio
            counted["warmup_steps"] = WARMUP_RATIO if ratio is None else ratio
        return {**counted, **given}

    def get_trainer_cls(self, _: Any) -> Any:
        """Return the trainer of packed documents; None for DPO, which gets its model otherwise."""
        if not self._packs:
            return None
        from hf_distca.integrations.axolotl_trainers import DistCAAxolotlTrainer

        return DistCAAxolotlTrainer

    def pre_model_load(self, cfg: Any) -> None:
        """Name the trainer of DPO.

        axolotl gives a trainer that is named here its model and reference model. It gives neither
        to the trainer of `get_trainer_cls`.
        """
        if not self._packs:
            cfg.trainer_cls = f"{TRAINERS}.DistCAAxolotlDPOTrainer"
