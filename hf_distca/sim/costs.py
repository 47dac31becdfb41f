"""What a device takes for core attention, for the rest of a layer, and for an exchange: measured, then fitted."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hf_distca.plan import AttentionKind, Direction
from hf_distca.planner.seconds import FloatArray, KernelCost, LinkCost, Links

PROFILES = Path(__file__).parent / "profiles"
"""Those that come with the package, by name."""


@dataclass(frozen=True)
class Accuracy:
    """How well costs predict times that they were not fitted to.

    Attributes:
        r2: share of the variance of the times that is predicted.
        worst_ratio: the largest of predicted over measured and measured over predicted.
        count: how many times were held out.
    """

    r2: float
    worst_ratio: float
    count: int

    @classmethod
    def of(cls, predicted: FloatArray, measured: FloatArray) -> "Accuracy":
        """Compare predictions with measurements, [n] each."""
        spread = float(np.square(measured - measured.mean()).sum())
        r2 = 1.0 - float(np.square(predicted - measured).sum()) / spread if spread else 1.0
        ratio = np.maximum(predicted / measured, measured / predicted)
        return cls(r2, float(ratio.max()), len(measured))


@dataclass(frozen=True)
class DeviceProfile:
    """What one kind of device, and the links between several, were measured to take.

    Attributes:
        name: for people.
        source: who measured what, how.
        dtype: of activations.
        measured: the kind of attention that was measured; others are scaled from it.
        forward: of the kernel.
        backward: of its backward.
        flops_per_second: of the matrices of a layer.
        bytes_per_second: at which norms, activations and sums read and write the memory of the device.
        peak_flops: that the maker names, of which model FLOPs utilization (MFU) is a share.
        links: what collectives take that may use all of a link, such as the gathering of K and V.
        exchange: what the exchange of rows takes, whose few thread blocks on GPUs leave the others to attention.
        launches: seconds that the host takes for a layer's forward besides, where the device waits for it.
        ranks_per_core: as in StepCosts; other costs were measured on all these ranks at once.
        accuracy: of the kernel's forward.
    """

    name: str
    source: str
    dtype: str
    measured: AttentionKind
    forward: KernelCost
    backward: KernelCost
    flops_per_second: float
    bytes_per_second: float
    peak_flops: float
    links: Links
    exchange: Links
    launches: float = 0.0
    ranks_per_core: float = 1.0
    accuracy: Accuracy = field(default=Accuracy(1.0, 1.0, 0))

    @property
    def bytes_per_value(self) -> int:
        """Of the dtype."""
        return 4 if self.dtype == "float32" else 2

    def kernel(self, kind: AttentionKind, direction: Direction) -> KernelCost:
        """What the kernel takes for a kind of attention."""
        cost = self.forward if direction == "forward" else self.backward
        return cost.for_kind(self.measured, kind)

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, name: str) -> "DeviceProfile":
        """Read a profile that comes with the package, by its name, or a file.

        Raises:
            ValueError: there is none, or it is not one.
        """
        shipped = sorted(path.stem for path in PROFILES.glob("*.json"))
        path = PROFILES / f"{name}.json" if name in shipped else Path(name)
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                **{
                    **content,
                    "measured": AttentionKind(**content["measured"]),
                    **{side: KernelCost(**content[side]) for side in ("forward", "backward")},
                    **{
                        speed: Links(**{name: _link(value) for name, value in content[speed].items()})
                        for speed in ("links", "exchange")
                    },
                    "accuracy": Accuracy(**content["accuracy"]),
                }
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"no device profile at {name!r}: expected one of {', '.join(shipped)}, or a file that hf-distca "
                f"profile wrote ({type(error).__name__}: {error})"
            ) from error


def _link(value: Any) -> Any:
    """A field of Links as JSON has it."""
    return LinkCost(**value) if isinstance(value, dict) else value


def held_out(count: int) -> tuple[Sequence[int], Sequence[int]]:
    """Indices of measurements to fit to, and of those to compare with: every third one, but not the outermost."""
    out = [index for index in range(1, count - 1) if index % 3 == 1]
    return [index for index in range(count) if index not in out], out
