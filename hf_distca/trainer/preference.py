"""TRL's trainers for preferences, rewards and reinforcement, on padded batches.

Their models compute the batches packed and planned.

Each trainer is TRL's own with `DistCAPaddedMixin`. Arguments, data, losses, rollouts and metrics
are TRL's.
"""

from dataclasses import dataclass
from typing import Any

from hf_distca.plan import ATTENTION_NAME
from hf_distca.refusal import PackageError, check
from hf_distca.trainer.arguments import DistCAPaddedArguments
from hf_distca.trainer.padded import DistCAPaddedMixin
from hf_distca.trainer.refusals import IMAGES, TRL_ARGUMENTS

try:
    from trl import (
        DPOConfig,
        DPOTrainer,
        GRPOConfig,
        GRPOTrainer,
        KTOConfig,
        KTOTrainer,
        RewardConfig,
        RewardTrainer,
        RLOOConfig,
        RLOOTrainer,
    )
except ModuleNotFoundError as error:
    if error.name != "trl":
        raise
    raise PackageError(
        "DistCADPOTrainer, DistCAGRPOTrainer, DistCARLOOTrainer, DistCAKTOTrainer and "
        "DistCARewardTrainer are based on TRL, which is not installed; run pip install "
        "'hf_distca[trl]'"
    ) from error


@dataclass
class DistCADPOConfig(DistCAPaddedArguments, DPOConfig):
    """`trl.DPOConfig` with the settings of `DistCAConfig`."""


@dataclass
class DistCAGRPOConfig(DistCAPaddedArguments, GRPOConfig):
    """`trl.GRPOConfig` with the settings of `DistCAConfig`."""


@dataclass
class DistCARLOOConfig(DistCAPaddedArguments, RLOOConfig):
    """`trl.RLOOConfig` with the settings of `DistCAConfig`."""


@dataclass
class DistCAKTOConfig(DistCAPaddedArguments, KTOConfig):
    """`trl.KTOConfig` with the settings of `DistCAConfig`."""


@dataclass
class DistCARewardConfig(DistCAPaddedArguments, RewardConfig):
    """`trl.RewardConfig` with the settings of `DistCAConfig`."""


class TRLMixin(DistCAPaddedMixin):
    """Parts of TRL's trainers that run before training: a model by its name, and log-probs."""

    def _prepare_arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        args: Any = named["args"]
        check(TRL_ARGUMENTS, args)
        if isinstance(named.get("model"), str):
            args.model_init_kwargs = {
                "attn_implementation": ATTENTION_NAME,
                **(args.model_init_kwargs or {}),
            }
        return super()._prepare_arguments(named)

    def _pack_models(self) -> None:
        check((IMAGES,), self)
        super()._pack_models()

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        """Compute log-probs of the reference, which TRL does at the end of its `__init__`."""
        self._pack_models()
        trl_trainer: Any = super()
        return trl_trainer._precompute_ref_logps(*args, **kwargs)


class DistCADPOTrainer(TRLMixin, DPOTrainer):
    """TRL's `DPOTrainer`, whose padded batches are computed packed and balanced.

    `args` is a `DistCADPOConfig`.
    """


class DistCAGRPOTrainer(TRLMixin, GRPOTrainer):
    """TRL's `GRPOTrainer`, whose padded batches are computed packed and balanced.

    `args` is a `DistCAGRPOConfig`.
    """


class DistCARLOOTrainer(TRLMixin, RLOOTrainer):
    """TRL's `RLOOTrainer`, whose padded batches are computed packed and balanced.

    `args` is a `DistCARLOOConfig`.
    """


class DistCAKTOTrainer(TRLMixin, KTOTrainer):
    """TRL's `KTOTrainer`, whose padded batches are computed packed and balanced.

    `args` is a `DistCAKTOConfig`.
    """


class DistCARewardTrainer(TRLMixin, RewardTrainer):
    """TRL's `RewardTrainer`, whose padded batches are computed packed and balanced.

    `args`: a `DistCARewardConfig`.
    """
