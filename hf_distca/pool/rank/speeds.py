"""Speeds of ranks and dedicated servers: measured at joining, corrected by the times of steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hf_distca.dispatch.recorder import Kind, Span, Work
from hf_distca.plan.cost import Workers
from hf_distca.plan.schedule import FROM_REMOTE, TO_REMOTE

SMOOTHING = 0.5
"""Share of a new observation in a speed, a base load or a travel time."""
FADING = 0.1
"""Share of a travel time that is forgotten in a step in which the server had no tasks: it is tried
again some day."""
DIRECTIONS = 2
"""A measured speed counts a pair once for its forward and backward, an observed one in each of
them."""

OBSERVED: tuple[Kind, ...] = ("phase", "kernel", "call", "remote")
"""Kinds of spans that `observe` reads."""


@dataclass(order=True)
class Served:
    """A server's calls that a rank took part in: pairs and seconds of the server's kernel."""

    pairs: int = 0
    seconds: float = 0.0
    # Calls that began while the rank had no call of another core attention under way.
    alone: int = 0
    # Seconds in which rows travelled there and back, of the calls that were alone.
    travel_s: float = 0.0


@dataclass
class Observed:
    """Times of attention that a rank saw since the speeds were last corrected."""

    calls: int = 0  # attentions of a nano-batch that servers took part in
    pairs: int = 0  # of the rank's own kernel
    seconds: float = 0.0  # of the rank's own kernel
    between_s: float = 0.0  # in which the rank worked outside of attention while servers computed
    servers: dict[int, Served] = field(default_factory=dict)  # by id


def observe(spans: Sequence[Span]) -> Observed:
    """Return the times of attention in a rank's spans of `OBSERVED`, in the order of recording."""
    observed = Observed()
    shared = _observe_phases(spans, observed)
    calls: dict[str, Span] = {}  # the latest by server
    for span in spans:
        seconds = span.end - span.begin
        if span.kind == "kernel":
            observed.pairs += span.pairs
            observed.seconds += seconds
        elif span.kind == "call":
            calls[span.part] = span
        elif span.kind == "remote":
            served = observed.servers.setdefault(int(span.part), Served())
            served.pairs += span.pairs
            served.seconds += seconds
            call = calls.pop(span.part, None)
            if call is not None and span.work not in shared:
                served.alone += 1
                # The clocks of two hosts need not run alike.
                served.travel_s += max((call.end - call.begin) - seconds, 0.0)
    return observed


def _observe_phases(spans: Sequence[Span], observed: Observed) -> set[Work | None]:
    """Note the rank's work between phases of attention while calls are under way.

    Returns the core attentions whose calls began while calls of others were under way. They are
    found by phases, because calls and phases are on different clocks.
    """
    shared = set[Work | None]()
    under_way = 0
    last_end: float | None = None
    phases = [span for span in spans if span.kind == "phase"]
    # Phases of a repair lie within another phase.
    for phase in sorted(phases, key=lambda span: span.begin):
        if under_way and last_end is not None:
            observed.between_s += max(phase.begin - last_end, 0.0)
        last_end = phase.end if last_end is None else max(last_end, phase.end)
        if TO_REMOTE in phase.part:
            if under_way:
                shared.add(phase.work)
            under_way += 1
        if FROM_REMOTE in phase.part:
            observed.calls += 1
            under_way = max(under_way - 1, 0)
    return shared


class Speeds:
    """Speeds of ranks and servers, the same on every rank.

    Args:
        rank_speed: the ranks' mean of `measure_speed`.
    """

    def __init__(self, rank_speed: float) -> None:
        self._rank_speed = DIRECTIONS * rank_speed  # observed pairs a second
        # Base load of a rank for one attention of a nano-batch, in pairs that a rank computes.
        self._base_load = 0.0
        # Speed of each server, relative to the ranks' mean.
        self._relative: dict[int, float] = {}
        # Time in which rows travel to a server and back for one attention, in pairs of a rank.
        self._travel: dict[int, float] = {}

    @property
    def pairs_per_second(self) -> float:
        """Mean speed of the ranks, as `measure_speed` counts pairs."""
        return self._rank_speed / DIRECTIONS

    def joined(self, server: int, measured: float) -> float:
        """Note a server with its `measure_speed`, and return its speed relative to a rank."""
        self._relative[server] = DIRECTIONS * measured / self._rank_speed
        self._travel[server] = 0.0
        return self._relative[server]

    def learn(self, observed: Sequence[Observed]) -> None:
        """Correct speeds and base loads by what the ranks saw."""
        # 1. The ranks' own speed, and their base load.
        seconds = sum(rank.seconds for rank in observed)
        pairs = sum(rank.pairs for rank in observed)
        rank_speed = self._rank_speed
        if seconds > 0 and pairs:
            rank_speed = pairs / seconds
            self._rank_speed = _smooth(self._rank_speed, rank_speed)
        calls = sum(rank.calls for rank in observed)
        if calls:
            between_s = sum(rank.between_s for rank in observed) / calls
            self._base_load = _smooth(self._base_load, between_s * rank_speed)

        # 2. The speed of each server, and how long rows travel to it.
        for server in self._relative:
            parts = [rank.servers[server] for rank in observed if server in rank.servers]
            # A rank sees some of a server's calls, and each of them with all its pairs. The rank
            # that saw the most pairs counts.
            largest = max(parts, default=Served())
            if largest.seconds > 0:
                server_speed = largest.pairs / largest.seconds
                self._relative[server] = _smooth(self._relative[server], server_speed / rank_speed)
            # A rank that sends first waits for the other ranks' rows. The shortest time is that of
            # the rank that sent last.
            travel_s = [part.travel_s / part.alone for part in parts if part.alone]
            if travel_s:
                self._travel[server] = _smooth(self._travel[server], min(travel_s) * rank_speed)
            elif not parts:
                self._travel[server] *= 1 - FADING

    def workers(self, ranks: int, servers: Sequence[int], takes_turns: bool) -> Workers:
        """Return speeds and base loads of the ranks and of servers behind them.

        With two nano-batches in turns, a rank does its other work, and rows travel, while a server
        computes. That work is the base load of the rank. Without turns a server does nothing while
        rows travel. That time is the base load of the server.
        """
        speeds = [1.0] * ranks + [self._relative[server] for server in servers]
        if takes_turns:
            base_loads = [self._base_load] * ranks + [0.0] * len(servers)
        else:
            base_loads = [0.0] * ranks + [self._travel[server] for server in servers]
        return Workers(tuple(speeds), tuple(base_loads))


def _smooth(value: float, observation: float) -> float:
    """Return a value moved towards a new observation by `SMOOTHING`."""
    return value + SMOOTHING * (observation - value)
