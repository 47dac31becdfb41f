"""Shape of an encoder of images: what it computes for patches."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EncoderShape:
    """Sizes of an encoder that determine its time.

    Patches attend to all patches of their image, or frame of a video. In layers with windows they
    attend to those of their window.
    """

    layers: int
    hidden: int
    heads: int
    layer_parameters: int  # of a layer's matrices
    full_layers: int  # layers without windows
    window: int = 0  # patches of a window

    @property
    def pairs_in_windows(self) -> int:
        """Pairs of a patch in the layers with windows."""
        return (self.layers - self.full_layers) * self.window

    @property
    def operations(self) -> tuple[float, float]:
        """Multiplications for a patch, and for a pair of patches in the layers without windows."""
        linear = self.layers * self.layer_parameters + 2 * self.hidden * self.pairs_in_windows
        return float(linear), 2.0 * self.hidden * self.full_layers
