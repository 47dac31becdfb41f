"""A training that is simulated."""

from typing import Any

from hf_distca.config import DistCAConfig
from hf_distca.predict.device_profile import DeviceProfile
from hf_distca.predict.shapes import ModelShape
from hf_distca.run import RunSpec


def simulated_run(
    model: ModelShape,
    ranks: int,
    tokens_per_rank: int,
    ranks_per_node: int = 1,
    profile: DeviceProfile | None = None,
    **facts: Any,
) -> RunSpec:
    """A training with hf_distca's defaults and activation checkpointing, on H100 without a profile;
    `facts` as of `RunSpec.of`.
    """
    return RunSpec.of(
        DistCAConfig(tokens_per_rank=tokens_per_rank),
        model,
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        profile=profile or DeviceProfile.load("h100"),
        **{"checkpointing": {}, **facts},
    )
