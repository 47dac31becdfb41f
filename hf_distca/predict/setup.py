"""Costs of a step from the shape of a model and the profile of a device."""

from dataclasses import dataclass, replace

from hf_distca.plan import AttentionKind
from hf_distca.predict.profile import DeviceProfile
from hf_distca.predict.seconds import KindCosts, MixingCosts, StepCosts
from hf_distca.predict.shapes import MixingShape, ModelShape

TOUCHED_BEFORE = 4
TOUCHED_AFTER = 10
"""Reads and writes of a token's hidden state before and after core attention, outside matrices.

Norms, rotations, activations and sums count; an activation of the MLP, some three times as wide,
counts three times.
"""
BACKWARD = 2.0
"""Backward of matrices over their forward: gradients of inputs and of weights.

Checkpointing adds the recomputed forward.
"""


@dataclass(frozen=True)
class Setup:
    """A model on a number of devices: together they give the costs of a step."""

    model: ModelShape
    profile: DeviceProfile
    ranks: int
    tokens_per_rank: int  # the most rows of a rank
    ranks_per_node: int | tuple[int, ...] = 1
    tensor_parallel: int = 1  # GPUs that share each layer and count as one rank
    checkpointing: bool = True  # layers are recomputed in the backward; core attention is not
    # No backward follows, as where log-probabilities of a reference are computed.
    forward_only: bool = False

    def on_a_gpu(self, kind: AttentionKind) -> AttentionKind:
        """Return a kind with the heads that one GPU of a rank has."""
        gpus = self.tensor_parallel
        return replace(kind, q_heads=kind.q_heads // gpus, kv_heads=max(kind.kv_heads // gpus, 1))

    @property
    def costs(self) -> StepCosts:
        """Costs of a micro-batch on a GPU."""
        model, profile = self.model, self.profile
        costs = StepCosts(
            kinds=tuple(self._kind_costs(kind, layers) for kind, layers in model.layers.items()),
            before_attention=self._matrix_seconds(model.before_attention, TOUCHED_BEFORE),
            after_attention=self._matrix_seconds(model.after_attention, TOUCHED_AFTER),
            backward_factor=BACKWARD + self.checkpointing,
            # Checkpointing recomputes no part of the head.
            head=self._matrix_seconds(model.head, 0) * (1 + BACKWARD),
            exchange=profile.exchange,
            launches=profile.launches,
            ranks_per_core=profile.ranks_per_core,
            mixing=None if model.mixing is None else self._mixing_costs(model.mixing),
        )
        return costs.forward_only() if self.forward_only else costs

    def _kind_costs(self, kind: AttentionKind, layers: int) -> KindCosts:
        kind = self.on_a_gpu(kind)
        forward = self.profile.kernel(kind, "forward")
        return KindCosts(kind, layers, forward, self.profile.kernel(kind, "backward"))

    def _matrix_seconds(self, parameters: int, touched: int) -> float:
        """Return the seconds of a token in matrices, and in reading and writing its hidden state.

        Args:
            parameters: of the matrices, on all GPUs of a rank.
            touched: how often the hidden state is read or written besides.
        """
        profile = self.profile
        flops_s = 2.0 * parameters / self.tensor_parallel / profile.flops_per_second
        size = touched * self.model.hidden * profile.bytes_per_value
        return flops_s + size / profile.bytes_per_second

    def _mixing_costs(self, shape: MixingShape) -> MixingCosts:
        operations, continued_operations = shape.operations
        touched, continued_touched = shape.touched
        gpus = self.tensor_parallel
        bytes_per_value = self.profile.bytes_per_value
        return MixingCosts(
            layers=shape.layers,
            before_mixing=self._matrix_seconds(shape.before_mixing, TOUCHED_BEFORE),
            mix=self._recurrence_seconds(operations, touched),
            continued=self._recurrence_seconds(continued_operations, continued_touched),
            after_mixing=self._matrix_seconds(shape.after_mixing, TOUCHED_AFTER),
            # A recurrence is launched like a kernel of attention.
            run=self.profile.forward.call,
            halo=shape.width * shape.channels / gpus * bytes_per_value,
            state=shape.state_bytes / gpus,
        )

    def _recurrence_seconds(self, operations: int, touched: int) -> float:
        """Return the seconds of a token in a recurrence, on a GPU of a rank.

        Args:
            operations: multiplications, on all GPUs of a rank.
            touched: numbers that are read or written, on all GPUs of a rank.
        """
        gpus, profile = self.tensor_parallel, self.profile
        flops_s = 2.0 * operations / gpus / profile.flops_per_second
        return flops_s + touched / gpus * profile.bytes_per_value / profile.bytes_per_second
