"""One training, described once: settings, facts of the model and facts of the launch.

Everything that prepares a training reads this description: plans and their costs, the model's
layers, the count of memory, the log and the model card. The user's settings stay as they were
given; what was chosen for "auto" stands here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from hf_distca.config import DistCAConfig
from hf_distca.planner.settings import PlanSettings
from hf_distca.predict.device_profile import DeviceProfile
from hf_distca.predict.seconds import StepCosts
from hf_distca.predict.shapes import ModelShape
from hf_distca.predict.step_costs import on_a_gpu, step_costs
from hf_distca.units import AUTO

Strategy = Literal["ddp", "fsdp2", "zero1", "zero2", "zero3"]
STRATEGIES: tuple[Strategy, ...] = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
"""How ranks share weights, gradients and optimizer."""


@dataclass(frozen=True)
class RunSpec:
    """One training, the same on every rank.

    Attributes:
        plans: Settings of plans: ranks and nodes, kinds of attention, layout, kernel.
        model: Shape of the model.
        profile: Costs of the device and its links; None if no seconds are predicted.
        tensor_parallel: GPUs that share each layer and count as one rank.
        checkpointing: transformers' `activation_checkpointing_kwargs`; None without activation
            checkpointing, which keeps the results of core attention.
        strategy: How ranks share the model's state.
        shards: Shards of the state under ZeRO and FSDP; None for one per rank.
        mixed: Whether computation is in bfloat16, else in float32. Under DDP bfloat16 is autocast.
        liger: transformers' `liger_kernel_config`; None without Liger's kernels.
        accumulates: Whether a step has several micro-batches. If not, gradients are freed before
            each.
        mlp_chunk_rows: Rows that MLPs compute at a time; 0 for all.
        loss_chunk_bytes: Most bytes of a chunk's logits in float32; 0 for all logits at once.
            "auto" depends on `device_memory`.
        offload: Whether activation checkpoints go to the host.
        device_memory: Bytes of the smallest GPU; None on CPUs.
        forward_only: No backward follows, as where log-probabilities of a reference are computed.
        share_prefixes: Whether equal prefixes are computed once where that changes no result.
        has_remote_workers: Whether workers that hold no rows may join and leave. Every plan is
            balanced again for those that are present, and is not chosen by costs.
    """

    plans: PlanSettings
    model: ModelShape
    profile: DeviceProfile | None = None
    tensor_parallel: int = 1
    checkpointing: Mapping[str, Any] | None = None
    strategy: Strategy = "ddp"
    shards: int | None = None
    mixed: bool = False
    liger: Mapping[str, Any] | None = None
    accumulates: bool = True
    mlp_chunk_rows: int = 0
    loss_chunk_bytes: int | Literal["auto"] = AUTO
    offload: bool = False
    device_memory: int | None = None
    forward_only: bool = False
    share_prefixes: bool = False
    has_remote_workers: bool = False

    @classmethod
    def of(
        cls,
        config: DistCAConfig,
        model: ModelShape,
        *,
        ranks: int,
        ranks_per_node: int | tuple[int, ...] = 1,
        profile: DeviceProfile | None = None,
        tensor_parallel: int = 1,
        planning: Mapping[str, Any] | None = None,
        **facts: Any,
    ) -> "RunSpec":
        """Describe a training on ranks.

        Args:
            ranks_per_node: ranks of each node of the launch, used where the settings say "auto".
            profile: costs of the device; None takes those that the settings name, if any.
            planning: what else is known of plans, as fields of PlanSettings.
            facts: further fields of RunSpec.

        Raises:
            ValueError: the nodes do not add up to the ranks, or no device profile has the name that
                the settings give.
        """
        plans = PlanSettings(
            **{
                **config.plan_settings(ranks, ranks_per_node),
                "kinds": tuple(on_a_gpu(kind, tensor_parallel) for kind in model.layers),
                **(planning or {}),
            }
        )
        settings = {
            "mlp_chunk_rows": 0 if config.mlp_chunk_rows == AUTO else config.mlp_chunk_rows,
            "loss_chunk_bytes": config.loss_chunk_bytes,
            "share_prefixes": config.share_prefixes,
            "has_remote_workers": config.remote_workers,
        }
        run = cls(plans, model, tensor_parallel=tensor_parallel, **{**settings, **facts})
        if profile is None and config.device_profile is not None:
            profile = DeviceProfile.load(config.device_profile)
        return run if profile is None else run.with_profile(profile)

    def with_profile(self, profile: DeviceProfile) -> "RunSpec":
        """Return the run with a profile, and plans that are chosen by its costs.

        One rank has nothing to choose.
        """
        run = replace(self, profile=profile)
        if self.plans.ranks == 1 or self.has_remote_workers:
            return run
        return replace(run, plans=replace(self.plans, costs=run.costs))

    @property
    def autocasts(self) -> bool:
        """Whether float32 weights are autocast, as under DDP; others cast them."""
        return self.mixed and self.strategy == "ddp"

    @property
    def device(self) -> DeviceProfile:
        """The profile of a run that has one, as every simulated run has.

        Raises:
            ValueError: the run has no profile.
        """
        if self.profile is None:
            raise ValueError("seconds of a run cannot be predicted without a device's profile")
        return self.profile

    @property
    def costs(self) -> StepCosts:
        """Costs of a micro-batch on a GPU, by the profile."""
        costs = step_costs(
            self.model,
            self.device,
            tensor_parallel=self.tensor_parallel,
            checkpointing=self.checkpointing is not None,
        )
        return costs.forward_only() if self.forward_only else costs
