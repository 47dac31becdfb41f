"""What a device takes for core attention, for the rest of a layer, and for an exchange: measured, then fitted."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import AttentionKind, Direction

PROFILES = Path(__file__).parent / "profiles"
"""Those that come with the package, by name."""

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Tasks:
    """Core attention that workers compute, counted.

    Attributes:
        rows: [workers] query rows.
        keys: [workers] K/V rows that are read.
        pairs: [workers] query-key pairs.
        calls: [workers] calls of the kernel.
    """

    rows: FloatArray
    keys: FloatArray
    pairs: FloatArray
    calls: FloatArray


@dataclass(frozen=True)
class KernelCost:
    """Seconds of a kernel call: call + row · query rows + key · K/V rows + pair · query-key pairs.

    Attributes:
        call: of each call, whatever it computes.
        row: of a query row.
        key: of a K/V row.
        pair: of a query-key pair.
    """

    call: float
    row: float
    key: float
    pair: float

    def seconds(self, tasks: Tasks) -> FloatArray:
        """[workers] what the tasks of each worker take."""
        amount: FloatArray = (
            self.call * tasks.calls + self.row * tasks.rows + self.key * tasks.keys + self.pair * tasks.pairs
        )
        return amount

    def for_kind(self, measured: AttentionKind, kind: AttentionKind) -> "KernelCost":
        """The cost of another kind of attention: pairs and query rows by the numbers of their query heads, K/V rows
        by those of their key-value heads."""
        queries = kind.q_heads * (kind.dim_qk + kind.dim_v) / (measured.q_heads * (measured.dim_qk + measured.dim_v))
        keys = kind.kv_heads * (kind.dim_qk + kind.dim_v) / (measured.kv_heads * (measured.dim_qk + measured.dim_v))
        return KernelCost(self.call, self.row * queries, self.key * keys, self.pair * queries)

    @classmethod
    def fitted(cls, tasks: Tasks, seconds: FloatArray, weights: FloatArray | None = None) -> "KernelCost":
        """The costs, none of them negative, that miss measured times by the least, in relation to each time.

        Of each subset of the four the least-squares solution is taken, if it has no negative number, and of these the
        one with the least error.

        Args:
            tasks: [n] calls that were measured.
            seconds: [n] what each took.
            weights: [n] how much the squared error of each counts; None for all alike.
        """
        counts = np.sqrt(np.ones_like(seconds) if weights is None else weights)
        columns = np.stack([tasks.calls, tasks.rows, tasks.keys, tasks.pairs], axis=1) * (counts / seconds)[:, None]
        best, least = np.zeros(4), np.inf
        for count in range(1, 5):
            for chosen in combinations(range(4), count):
                part = columns[:, chosen]
                found, *_ = np.linalg.lstsq(part, counts, rcond=None)
                error = float(np.square(part @ found - counts).sum())
                if found.min() >= 0 and error < least:
                    best, least = np.zeros(4), error
                    best[list(chosen)] = found
        return cls(*best.tolist())


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
class LinkCost:
    """Seconds of an exchange: latency + bytes / bandwidth.

    Attributes:
        latency: of an exchange, in seconds.
        bandwidth: bytes per second that a rank sends, and receives at the same time.
    """

    latency: float
    bandwidth: float

    def seconds(self, size: FloatArray) -> FloatArray:
        """[ranks] what an exchange of so many bytes takes; none where there is nothing."""
        taken: FloatArray = np.where(size > 0, self.latency + size / self.bandwidth, 0.0)
        return taken

    @classmethod
    def fitted(cls, size: FloatArray, seconds: FloatArray) -> "LinkCost":
        """The link that misses measured times by the least, in relation to each time; [n] bytes, [n] seconds."""
        fit = KernelCost.fitted(Tasks(size, size * 0, size * 0, np.ones_like(size)), seconds)
        return cls(fit.call, 1 / fit.row if fit.row else np.inf)


@dataclass(frozen=True)
class Links:
    """Seconds between ranks.

    Attributes:
        within: inside a node.
        between: between nodes.
    """

    within: LinkCost
    between: LinkCost


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
                        speed: Links(**{place: LinkCost(**cost) for place, cost in content[speed].items()})
                        for speed in ("links", "exchange")
                    },
                    "accuracy": Accuracy(**content["accuracy"]),
                }
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"no profile of a device at {name!r}: expected one of {', '.join(shipped)}, or a file that "
                f"hf-distca profile has written ({type(error).__name__}: {error})"
            ) from error


def held_out(count: int) -> tuple[Sequence[int], Sequence[int]]:
    """Indices of measurements to fit to, and of those to compare with: every third one, but not the outermost."""
    out = [index for index in range(1, count - 1) if index % 3 == 1]
    return [index for index in range(count) if index not in out], out
