"""How fast ranks and dedicated servers are: measured at joining, corrected by what the steps show."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from hf_distca.dispatch.recorder import Recorder
from hf_distca.planner.cost import Workers

SMOOTHING = 0.5
"""Share of a new observation in a speed, a base load or a way."""
FADING = 0.1
"""Share of a way that is forgotten in a step whose plan gave the server nothing to do: it is tried again some day."""
DIRECTIONS = 2
"""A measured speed counts a pair once for its forward and backward, an observed one in each of them."""


@dataclass(order=True)
class Served:
    """A server's calls that a rank took part in.

    Attributes:
        pairs: query-key pairs of their tasks.
        seconds: time of the server's kernel.
        alone: calls that came while the rank had no other call under way.
        way_s: of these, the time from the call to its results without the kernel's: rows on their way there and back.
    """

    pairs: int = 0
    seconds: float = 0.0
    alone: int = 0
    way_s: float = 0.0


@dataclass
class Observed:
    """What a rank saw of the time that attention takes, since the speeds were last corrected.

    Attributes:
        calls: attentions of a nano-batch that servers took part in.
        pairs: query-key pairs of this rank's own tasks.
        seconds: time of its kernel.
        between_s: time that it worked outside of attention while servers computed.
        servers: calls by server id.
    """

    calls: int = 0
    pairs: int = 0
    seconds: float = 0.0
    between_s: float = 0.0
    servers: dict[int, Served] = field(default_factory=dict)


class Stopwatch:
    """Collects what a rank sees.

    Args:
        recorder: tells of this rank's own kernel calls.

    Attributes:
        observed: so far.
        under_way: calls to servers that have been started and not collected.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._kernels = recorder.listen("kernel")
        self._left_step: float | None = None
        self.under_way = 0
        self.observed = Observed()

    def begin(self) -> None:
        """Forget what was seen."""
        self._kernels.take()
        self.observed = Observed()

    def read(self) -> Observed:
        """What was seen since `begin`. On CUDA it waits for the kernels to end."""
        for span in self._kernels.take():
            self.observed.seconds += span.end - span.begin
            self.observed.pairs += span.pairs
        return self.observed

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around each step of an attention: what lies between steps is the rank's other work."""
        now = time.perf_counter()
        if self.under_way and self._left_step is not None:
            self.observed.between_s += now - self._left_step
        yield
        self._left_step = time.perf_counter()

    def served(self, server: int, pairs: int, seconds: float, way_s: float | None) -> None:
        """A server has answered a call.

        Args:
            server: its id.
            pairs: of its tasks.
            seconds: of its kernel.
            way_s: time besides, None where the call was not alone.
        """
        seen = self.observed.servers.setdefault(server, Served())
        seen.pairs += pairs
        seen.seconds += seconds
        if way_s is not None:
            seen.alone += 1
            seen.way_s += max(way_s, 0.0)


class Speeds:
    """What is known of the speeds; the same on every rank.

    Args:
        own: the ranks' mean speed as `measure_speed` gives it, in pairs per second.
    """

    def __init__(self, own: float) -> None:
        self._own = DIRECTIONS * own  # as observed
        self._base_load = 0.0  # of a rank, in pairs of its own, for one attention of a nano-batch
        self._relative: dict[int, float] = {}  # of servers, to the ranks' mean
        self._ways: dict[int, float] = {}  # to servers and back, in pairs of a rank, for one attention

    def joined(self, server: int, measured: float) -> float:
        """A server takes part; returns its speed relative to a rank.

        Args:
            server: its id.
            measured: its speed as `measure_speed` gives it, in pairs per second.
        """
        self._relative[server] = DIRECTIONS * measured / self._own
        self._ways[server] = 0.0
        return self._relative[server]

    def learn(self, observed: Sequence[Observed]) -> None:
        """Correct speeds and base loads by what the ranks saw."""
        seconds, pairs = sum(seen.seconds for seen in observed), sum(seen.pairs for seen in observed)
        own = self._own
        if seconds > 0 and pairs:
            own = pairs / seconds
            self._own = _smoothed(self._own, own)
        if calls := sum(seen.calls for seen in observed):
            between = sum(seen.between_s for seen in observed) / calls
            self._base_load = _smoothed(self._base_load, between * own)
        for server in self._relative:
            parts = [seen.servers[server] for seen in observed if server in seen.servers]
            # Every rank saw some of a server's calls, and each of these whole.
            most = max(parts, default=Served())
            if most.seconds > 0:
                self._relative[server] = _smoothed(self._relative[server], most.pairs / most.seconds / own)
            # Who sends first waits for the other ranks' rows; the shortest is that of the rank that sent last.
            ways = [part.way_s / part.alone for part in parts if part.alone]
            if ways:
                self._ways[server] = _smoothed(self._ways[server], min(ways) * own)
            elif not parts:
                self._ways[server] *= 1 - FADING

    def workers(self, ranks: int, servers: Sequence[int], takes_turns: bool) -> Workers:
        """Speeds and base loads of the ranks and of servers behind them.

        With two nano-batches in turns, a rank does its other work, and rows travel, while a server computes: the
        work is the rank's base load. Without turns a server does nothing while rows travel: its own base load.

        Args:
            ranks: number of ranks.
            servers: ids.
            takes_turns: whether two nano-batches take turns.
        """
        base_load = (self._base_load,) * ranks + (0.0,) * len(servers)
        if not takes_turns:
            base_load = (0.0,) * ranks + tuple(self._ways[server] for server in servers)
        return Workers((1.0,) * ranks + tuple(self._relative[server] for server in servers), base_load)


def _smoothed(old: float, new: float) -> float:
    return old + SMOOTHING * (new - old)
