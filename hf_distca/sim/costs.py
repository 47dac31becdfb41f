"""Costs of core attention, of the rest of a layer and of an exchange on a device, fitted to measurements."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hf_distca.plan import AttentionKind, Direction
from hf_distca.planner.seconds import FloatArray, KernelCost, LinkCost, Links

PROFILES = Path(__file__).parent / "profiles"
"""Folder of the profiles that come with the package."""


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of predicted times that the costs were not fitted to.

    Attributes:
        r2: share of the variance of the times that is predicted.
        worst_ratio: the largest ratio between predicted and measured times, whichever is larger.
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
    """Measured costs of one kind of device, and of the links between several.

    Attributes:
        source: who measured the costs, and how.
        measured: the measured kind of attention; costs of other kinds are scaled from it.
        flops_per_second: rate of the matrices of a layer.
        bytes_per_second: rate at which norms, activations and sums read and write the device's memory.
        peak_flops: rate that the maker names; model FLOPs utilization (MFU) is a share of it.
        links: links of collectives that may use a link fully, such as gathering K and V.
        exchange: links of the exchange of rows. On GPUs it uses few thread blocks and leaves the others to attention.
        launches: seconds of the host for a layer's forward while the device waits.
        ranks_per_core: as in StepCosts; other costs were measured on all these ranks at once.
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
        """Bytes of a value of the dtype."""
        return 4 if self.dtype == "float32" else 2

    def kernel(self, kind: AttentionKind, direction: Direction) -> KernelCost:
        """Return the kernel's cost for a kind of attention."""
        cost = self.forward if direction == "forward" else self.backward
        return cost.for_kind(self.measured, kind)

    def save(self, path: Path) -> None:
        """Write the profile as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, name: str) -> "DeviceProfile":
        """Read a profile by its name, if it comes with the package, or from a file.

        Raises:
            ValueError: there is no such profile, or the file does not hold one.
        """
        shipped = sorted(path.stem for path in PROFILES.glob("*.json"))
        path = PROFILES / f"{name}.json" if name in shipped else Path(name)
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8"), object_hook=_part))
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(
                f"no device profile at {name!r}: expected one of {', '.join(shipped)}, or a file that hf-distca "
                f"profile wrote ({type(error).__name__}: {error})"
            ) from error


def _part(found: dict[str, Any]) -> Any:
    """Return the part of a profile that a JSON object describes, or the object itself."""
    parts: dict[str, Callable[..., Any]] = {
        "latency": LinkCost,
        "within": Links,
        "pair": KernelCost,
        "q_heads": AttentionKind,
        "r2": Accuracy,
    }
    return next((part(**found) for key, part in parts.items() if key in found), found)


def held_out(count: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return indices of measurements to fit to, and of those to compare with.

    Every third measurement is held out, but never the first or the last.
    """
    out = [index for index in range(1, count - 1) if index % 3 == 1]
    return [index for index in range(count) if index not in out], out
