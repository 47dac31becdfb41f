"""The least that a rank has in memory, reckoned from shapes; `hf-distca plan --model` counts it on the model."""

from hf_distca.sim.ways import Setup

STATE_BYTES = 16
"""Of a parameter: weight, gradient and two moments of the optimizer, in float32."""
LOG_SUM_EXP_BYTES = 4
"""Of a query head and row, in float32."""


def kept_bytes(setup: Setup, rows: int) -> int | None:
    """What a rank keeps of its rows for the backward under checkpointing: the input of each layer, and with it the
    result of core attention, O and its log-sum-exp. None without checkpointing, where it is many times as much.

    Args:
        setup: who trains what.
        rows: of the rank.
    """
    if not setup.checkpointing:
        return None
    value = setup.profile.bytes_per_value
    attention = sum(
        count * kind.q_heads * (kind.dim_v * value + LOG_SUM_EXP_BYTES)
        for kind, count in ((setup.on_a_gpu(kind), count) for kind, count in setup.model.layers.items())
    )
    return rows * (setup.model.depth * setup.model.hidden * value + attention)


def state_bytes(setup: Setup) -> int:
    """Weights, gradients and optimizer on a GPU, divided over all that train, as by FSDP2 or ZeRO-3."""
    return STATE_BYTES * setup.model.parameters // (setup.ranks * setup.tensor_parallel)
