"""Costs of a step from the shape of a model and the profile of a device."""

from dataclasses import dataclass, replace

from hf_distca.plan import AttentionKind
from hf_distca.predict.device_profile import DeviceProfile
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


def step_costs(
    model: ModelShape, profile: DeviceProfile, *, tensor_parallel: int = 1, checkpointing: bool
) -> StepCosts:
    """Return the costs of a micro-batch on a GPU.

    Args:
        tensor_parallel: GPUs that share each layer and count as one rank.
        checkpointing: whether the backward computes layers again, all but their core attention.
    """
    gpu = _Gpu(model, profile, tensor_parallel)
    return StepCosts(
        kinds=tuple(gpu.kind_costs(kind, layers) for kind, layers in model.layers.items()),
        before_attention=gpu.matrix_seconds(model.before_attention, TOUCHED_BEFORE),
        after_attention=gpu.matrix_seconds(model.after_attention, TOUCHED_AFTER),
        backward_factor=BACKWARD + checkpointing,
        # Checkpointing recomputes no part of the head.
        head=gpu.matrix_seconds(model.head, 0) * (1 + BACKWARD),
        exchange=profile.exchange,
        launches=profile.launches,
        ranks_per_core=profile.ranks_per_core,
        mixing=None if model.mixing is None else gpu.mixing_costs(model.mixing),
    )


def on_a_gpu(kind: AttentionKind, tensor_parallel: int) -> AttentionKind:
    """Return a kind with the heads that one of the GPUs has which share each layer."""
    return replace(
        kind,
        q_heads=kind.q_heads // tensor_parallel,
        kv_heads=max(kind.kv_heads // tensor_parallel, 1),
    )


@dataclass(frozen=True)
class _Gpu:
    """One of the GPUs that share each layer of a model."""

    model: ModelShape
    profile: DeviceProfile
    gpus: int

    def kind_costs(self, kind: AttentionKind, layers: int) -> KindCosts:
        """Return the costs of core attention in the layers of a kind."""
        kind = on_a_gpu(kind, self.gpus)
        forward = self.profile.kernel(kind, "forward")
        return KindCosts(kind, layers, forward, self.profile.kernel(kind, "backward"))

    def matrix_seconds(self, parameters: int, touched: int) -> float:
        """Return the seconds of a token in matrices, and in reading and writing its hidden state.

        Args:
            parameters: of the matrices, on all GPUs of a rank.
            touched: how often the hidden state is read or written besides.
        """
        profile = self.profile
        flops_s = 2.0 * parameters / self.gpus / profile.flops_per_second
        size = touched * self.model.hidden * profile.bytes_per_value
        return flops_s + size / profile.bytes_per_second

    def mixing_costs(self, shape: MixingShape) -> MixingCosts:
        """Return the costs of a layer that mixes rows in order."""
        operations, continued_operations = shape.operations
        touched, continued_touched = shape.touched
        bytes_per_value = self.profile.bytes_per_value
        return MixingCosts(
            layers=shape.layers,
            before_mixing=self.matrix_seconds(shape.before_mixing, TOUCHED_BEFORE),
            mix=self._recurrence_seconds(operations, touched),
            continued=self._recurrence_seconds(continued_operations, continued_touched),
            after_mixing=self.matrix_seconds(shape.after_mixing, TOUCHED_AFTER),
            # A recurrence is launched like a kernel of attention.
            run=self.profile.forward.call,
            halo=shape.width * shape.channels / self.gpus * bytes_per_value,
            state=shape.state_bytes / self.gpus,
        )

    def _recurrence_seconds(self, operations: int, touched: int) -> float:
        """Return the seconds of a token in a recurrence.

        Args:
            operations: multiplications, on all GPUs of a rank.
            touched: numbers that are read or written, on all GPUs of a rank.
        """
        profile = self.profile
        flops_s = 2.0 * operations / self.gpus / profile.flops_per_second
        return flops_s + touched / self.gpus * profile.bytes_per_value / profile.bytes_per_second
