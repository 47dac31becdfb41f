"""Profiles of devices: measured costs of kernels, matrices, memory and links, kept as files."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hf_distca.checks.plan_rules import Plans
from hf_distca.plan import AttentionKind, Direction
from hf_distca.plan.arrays import FloatArray
from hf_distca.predict.seconds import KernelCost, LinkCost, Links

PROFILES = Path(__file__).parent / "profiles"
"""Folder of the profiles that come with the package."""


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of predicted times that the costs were not fitted to."""

    r2: float  # share of the variance of the times that is predicted
    worst_ratio: float  # of predicted and measured times, the larger over the smaller
    count: int  # of times that were predicted

    @classmethod
    def of(cls, predicted: FloatArray, measured: FloatArray) -> "Accuracy":
        """Compare predictions with measurements, [n] each."""
        spread = float(np.square(measured - measured.mean()).sum())
        r2 = 1.0 - float(np.square(predicted - measured).sum()) / spread if spread else 1.0
        ratios = np.maximum(predicted / measured, measured / predicted)
        return cls(r2, worst_ratio=float(ratios.max()), count=len(measured))


@dataclass(frozen=True)
class DeviceProfile:
    """Measured costs of one kind of device, and of the links between several."""

    name: str
    source: str  # who measured the costs, and how
    dtype: str
    measured: AttentionKind  # costs of other kinds are scaled from these
    forward: KernelCost
    backward: KernelCost
    flops_per_second: float  # of a layer's matrices
    # Norms, activations and sums read and write the device's memory at this rate.
    bytes_per_second: float
    # The rate that the maker names; model FLOPs utilization (MFU) is a share of it.
    peak_flops: float
    links: Links  # of collectives that may use a link fully, such as gathering K and V
    exchange: Links  # of rows. On GPUs it uses few thread blocks and leaves the others to attention
    launches: float = 0.0  # seconds of the host for a layer's forward while the device waits
    # As in `StepCosts`; the costs of kernels were measured on all these ranks at once.
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
            why = f"{type(error).__name__}: {error}"
            raise Plans.NO_PROFILE.error(given=name, why=why, shipped=", ".join(shipped)) from error


PARTS: dict[str, Callable[..., Any]] = {
    "latency": LinkCost,
    "within": Links,
    "pair": KernelCost,
    "q_heads": AttentionKind,
    "r2": Accuracy,
}
"""Classes of a profile's parts, by a key that only the part's JSON object has."""


def _part(content: dict[str, Any]) -> Any:
    """Convert a JSON object of a profile to the part's class, if it has the key of such a part."""
    for key, make in PARTS.items():
        if key in content:
            return make(**content)
    return content


def held_out(count: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return indices of measurements to fit costs to, and of others to compare predictions with.

    Every third measurement is held out, but neither the first nor the last: a prediction beyond
    the fitted sizes would say little.
    """
    compared = list(range(1, count - 1, 3))
    return [index for index in range(count) if index not in compared], compared
