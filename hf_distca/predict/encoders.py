"""Seconds of an encoder of images, from its shape and the profile of a device."""

from dataclasses import dataclass

from hf_distca.batches.encoder_shape import EncoderShape
from hf_distca.plan import AttentionKind
from hf_distca.plan.arrays import FloatArray, IntArray
from hf_distca.predict.device_profile import DeviceProfile
from hf_distca.predict.step_costs import BACKWARD, TOUCHED_AFTER, TOUCHED_BEFORE


@dataclass(frozen=True)
class EncoderCosts:
    """Seconds of an encoder that is trained, forward and backward together."""

    patch: float  # in matrices, memory and attention within windows
    pair: float  # of patches in attention without windows

    def seconds(self, patches: IntArray, pairs: IntArray) -> FloatArray:
        """Return [images] seconds of each image.

        Args:
            patches: of each image.
            pairs: of patches that attend to each other without windows.
        """
        seconds: FloatArray = self.patch * patches + self.pair * pairs
        return seconds


def encoder_costs(
    shape: EncoderShape, profile: DeviceProfile, *, checkpointing: bool
) -> EncoderCosts:
    """Return the costs of an encoder on a GPU.

    Its kernel of attention is taken to need as long for a pair as the kernel of the text model.

    Args:
        checkpointing: whether the backward computes layers again, with their attention.
    """
    head_dim = shape.hidden // shape.heads
    kind = AttentionKind(None, shape.heads, shape.heads, head_dim, head_dim)
    forward, backward = profile.kernel(kind, "forward"), profile.kernel(kind, "backward")
    passes = 1 + checkpointing  # forward
    touched = (TOUCHED_BEFORE + TOUCHED_AFTER) * shape.hidden * profile.bytes_per_value
    matrices = 2.0 * shape.layer_parameters / profile.flops_per_second
    rows = passes * (forward.row + forward.key) + backward.row + backward.key
    pair = passes * forward.pair + backward.pair
    layer = (passes + BACKWARD) * (matrices + touched / profile.bytes_per_second) + rows
    return EncoderCosts(
        patch=shape.layers * layer + shape.pairs_in_windows * pair, pair=shape.full_layers * pair
    )
