"""TRL's trainers for preferences, rewards and reinforcement, on padded batches.

Their models compute the batches packed and planned.

Each trainer is TRL's own with `DistCAPaddedMixin`. Arguments, data, losses, rollouts and metrics
are TRL's. Rollouts of one prompt are kept in one micro-batch, so that the prompt is computed once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import gcd
from typing import Any

import torch
from torch import Tensor
from transformers.utils.logging import get_logger

from hf_distca.checks.refusal import PackageError
from hf_distca.dispatch.process_groups import Groups
from hf_distca.patches.padded_models import plan_ahead
from hf_distca.planner import prefixes
from hf_distca.planner.prompts import Prompt, divided_by_prompts
from hf_distca.trainer.arguments import DistCAPaddedArguments
from hf_distca.trainer.padded import DistCAPaddedMixin

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

logger = get_logger(__name__)

LOSSES = ("grpo", "sapo", "dr_grpo", "luspo", "dapo", "cispo", "vespo")
"""Values of `loss_type` for which a loss is a sum over sequences or tokens, divided by a number
that is the same for all micro-batches of an optimizer step. "bnpo" divides by the tokens of a
micro-batch."""


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
    """The part of TRL's trainers that runs before training: log-probs of the reference."""

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        """Compute log-probs of the reference, which TRL does at the end of its `__init__`."""
        self._pack_models()
        trl_trainer: Any = super()
        return trl_trainer._precompute_ref_logps(*args, **kwargs)


class RolloutMixin(TRLMixin):
    """Rollouts, which are all known before the model sees the first of them.

    Those of a prompt are kept together, and plans are made on a thread while the model computes.
    """

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Generate rollouts as TRL does, divide them into micro-batches, and plan these."""
        trainer: Any = self
        earlier = trainer._buffered_inputs
        inputs = super()._prepare_inputs(*args, **kwargs)
        if trainer._buffered_inputs is earlier:
            return inputs
        micro_batches = self._divided_by_prompts(trainer._buffered_inputs)
        trainer._buffered_inputs = micro_batches
        batches = []
        for rollouts in micro_batches:
            batch = {
                name: torch.cat([rollouts[f"prompt_{part}"], rollouts[f"completion_{part}"]], 1)
                for name, part in (("input_ids", "ids"), ("attention_mask", "mask"))
            }
            batches.append(batch)
        self._plan_ahead(batches)
        return micro_batches[0]  # TRL generates only before the first of them

    def _plan_ahead(self, batches: list[dict[str, Tensor]]) -> None:
        """Begin to plan batches that the models are given later. A collective call."""
        plan_ahead(self.model, batches)

    def _divided_by_prompts(self, micro_batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the micro-batches with completions of a prompt together, if the loss allows it."""
        # As many successive micro-batches are always of one optimizer step.
        together = gcd(len(micro_batches), self.args.gradient_accumulation_steps)
        if together == 1 or not self._shares_prefixes:
            return micro_batches
        reason = why_shuffled(self)
        if reason is None:
            dispatcher = self.dispatcher
            return kept_together(micro_batches, together, dispatcher.groups, dispatcher.pod)
        if self.args.process_index == 0:
            logger.info_once(f"completions of a prompt are not kept together: {reason}")
        return micro_batches

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return log-probs as TRL does, and plan all chunks of `batch_size` rows before the first.

        Chunks are not joined: `batch_size` limits the padded rows of the head.
        """
        if batch_size is not None and batch_size < len(input_ids):
            chunks = zip(input_ids.split(batch_size), attention_mask.split(batch_size), strict=True)
            batches = [{"input_ids": ids, "attention_mask": mask} for ids, mask in chunks]
            plan_ahead(self.accelerator.unwrap_model(model), batches)
        trl_trainer: Any = super()
        return trl_trainer._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs
        )


class DistCADPOTrainer(TRLMixin, DPOTrainer):
    """TRL's `DPOTrainer`, whose padded batches are computed packed and balanced.

    `args` is a `DistCADPOConfig`.
    """


class DistCAGRPOTrainer(RolloutMixin, GRPOTrainer):
    """TRL's `GRPOTrainer`, whose padded batches are computed packed and balanced.

    `args` is a `DistCAGRPOConfig`.
    """


class DistCARLOOTrainer(RolloutMixin, RLOOTrainer):
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


# Rollouts of one prompt


def prompts_of(rollouts: dict[str, Any]) -> list[Prompt]:
    """Return the prompt of each rollout, in whole blocks of tokens.

    Args:
        rollouts: `prompt_ids` and `prompt_mask` [rollouts, columns].
    """
    prompts = []
    tokens_BL, mask_BL = (rollouts[name].cpu().numpy() for name in ("prompt_ids", "prompt_mask"))
    for tokens_L, mask_L in zip(tokens_BL, mask_BL != 0, strict=True):
        hashes = prefixes.hashes_of(tokens_L[mask_L][:, None])
        blocks = int(mask_L.sum()) // prefixes.BLOCK
        key = hashes[blocks - 1] if blocks else b""
        prompts.append(Prompt(key, blocks * prefixes.BLOCK))
    return prompts


def rearranged(micro_batches: Sequence[dict[str, Any]], order: Tensor) -> list[dict[str, Any]]:
    """Return micro-batches of the same sizes, with their rollouts in another order.

    Args:
        micro_batches: values of each rollout by name, tensors or lists; None and numbers stay.
        order: [rollouts of all micro-batches] index of each rollout.
    """
    results: list[dict[str, Any]] = [{} for _ in micro_batches]
    for name, first in micro_batches[0].items():
        values = [micro_batch[name] for micro_batch in micro_batches]
        if isinstance(first, Tensor) and first.ndim > 0:
            values = list(torch.cat(values)[order.to(first.device)].split(len(first)))
        elif isinstance(first, list):
            joined = [value for part in values for value in part]
            ordered = [joined[index] for index in order.tolist()]
            values = [ordered[i * len(first) : (i + 1) * len(first)] for i in range(len(values))]
        for result, value in zip(results, values, strict=True):
            result[name] = value
    return results


def kept_together(
    micro_batches: list[dict[str, Any]], together: int, groups: Groups, pod: range
) -> list[dict[str, Any]]:
    """Return micro-batches in which completions of a prompt meet. A collective call.

    Args:
        micro_batches: of this rank, as many as on every rank; values of each rollout by name.
        together: the number of successive micro-batches among which rollouts may change places.
        pod: ranks whose rollouts may share rows.
    """
    prompts_of_ranks = groups.all_gather_in_pod(
        pod,
        lambda: [prompts_of(micro_batch) for micro_batch in micro_batches],
        lambda _: None,
        contents="prompts of rollouts",
    ).values
    results = []
    for first in range(0, len(micro_batches), together):
        part = slice(first, first + together)
        orders = divided_by_prompts(
            [list(chain(*prompts[part])) for prompts in prompts_of_ranks], together
        )
        results += rearranged(
            micro_batches[part], torch.from_numpy(orders[groups.rank - pod.start])
        )
    return results


def why_shuffled(trainer: Any) -> str | None:
    """Return why rollouts of GRPO or RLOO stay in the micro-batches of TRL's shuffle.

    None if the loss does not depend on which rollouts share a micro-batch.
    """
    args = trainer.args
    loss_type = getattr(args, "loss_type", None)  # RLOO has none
    if not trainer._compute_loss.__module__.startswith("trl."):
        return "the trainer has a loss of its own"
    if loss_type is not None and loss_type not in LOSSES:
        return f"loss_type={loss_type!r} takes a mean over the tokens of a micro-batch"
    if getattr(args, "top_entropy_quantile", 1.0) < 1.0:
        return "top_entropy_quantile chooses among the tokens of a micro-batch"
    if getattr(trainer, "_entropy_bonus_enabled", False):
        return "the entropy bonus is a mean over the tokens of a micro-batch"
    if getattr(trainer, "aux_loss_enabled", False):  # distillation has none
        return "the router's auxiliary loss is computed from the tokens of a micro-batch"
    return None
