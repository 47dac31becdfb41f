"""Costs of a step from the shape of a model and the profile of a device."""

from dataclasses import dataclass, replace

from hf_distca.plan import AttentionKind
from hf_distca.predict.profile import DeviceProfile
from hf_distca.predict.seconds import KindCosts, MixingCosts, StepCosts
from hf_distca.predict.shapes import ModelShape

TOUCHED_BEFORE, TOUCHED_AFTER = 4, 10
"""Reads and writes of a token's hidden state before and after core attention, outside matrices.

Norms, rotations, activations and sums count; an activation of the MLP, some three times as wide,
counts three times.
"""
BACKWARD = 2.0
"""Backward of matrices over their forward; checkpointing adds the recomputed forward."""


@dataclass(frozen=True)
class Setup:
    """Model, device and ranks of a simulation."""

    model: ModelShape
    profile: DeviceProfile
    ranks: int
    tokens_per_rank: int  # the most rows of a rank
    ranks_per_node: int | tuple[int, ...] = 1
    tensor_parallel: int = 1  # GPUs that share each layer and count as one rank
    checkpointing: bool = True  # layers are recomputed in the backward; core attention is not
    forward_only: bool = (
        False  # no backward follows, as where log-probabilities of a reference are computed
    )

    def on_a_gpu(self, kind: AttentionKind) -> AttentionKind:
        """Return a kind with the heads that one GPU of a rank has."""
        parts = self.tensor_parallel
        return replace(kind, q_heads=kind.q_heads // parts, kv_heads=max(kind.kv_heads // parts, 1))

    @property
    def costs(self) -> StepCosts:
        """Costs of a micro-batch on a GPU."""
        model, profile, gpus, shape = (
            self.model,
            self.profile,
            self.tensor_parallel,
            self.model.mixing,
        )

        def matrices(weights: int, touched: int) -> float:
            """Return the seconds of a token in matrices and in reading and writing the hidden state."""
            flops = 2.0 * weights / gpus / profile.flops_per_second
            return (
                flops + touched * model.hidden * profile.bytes_per_value / profile.bytes_per_second
            )

        mixing = None
        if shape is not None:
            mix, continued = (
                2.0 * operations / gpus / profile.flops_per_second
                + numbers / gpus * profile.bytes_per_value / profile.bytes_per_second
                for operations, numbers in zip(shape.operations, shape.touched, strict=True)
            )
            mixing = MixingCosts(
                shape.layers,
                before=matrices(shape.before, TOUCHED_BEFORE),
                mix=mix,
                continued=continued,
                after=matrices(shape.after, TOUCHED_AFTER),
                run=profile.forward.call,
                halo=shape.width * shape.channels / gpus * profile.bytes_per_value,
                state=shape.state_bytes / gpus,
            )
        kinds = [(self.on_a_gpu(kind), layers) for kind, layers in model.layers.items()]
        costs = StepCosts(
            tuple(
                KindCosts(
                    kind, layers, profile.kernel(kind, "forward"), profile.kernel(kind, "backward")
                )
                for kind, layers in kinds
            ),
            before=matrices(model.before, TOUCHED_BEFORE),
            after=matrices(model.after, TOUCHED_AFTER),
            backward_factor=BACKWARD + self.checkpointing,
            head=matrices(model.head, 0) * (1 + BACKWARD),  # chunks are computed once
            exchange=profile.exchange,
            launches=profile.launches,
            ranks_per_core=profile.ranks_per_core,
            mixing=mixing,
        )
        return costs.forward_only() if self.forward_only else costs
