"""How fast ranks and dedicated servers are: measured at joining, corrected by what the steps show."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hf_distca.dispatch.recorder import Kind, Span, Work
from hf_distca.plan.cost import Workers
from hf_distca.plan.schedule import FROM_SERVERS, TO_SERVERS

SMOOTHING = 0.5
"""Share of a new observation in a speed, a base load or a travel time."""
FADING = 0.1
"""Share of a travel time that is forgotten in a step in which the server had no tasks: it is tried
again some day."""
DIRECTIONS = 2
"""A measured speed counts a pair once for its forward and backward, an observed one in each of
them."""

OBSERVED: tuple[Kind, ...] = ("phase", "kernel", "call", "server")
"""Kinds of spans that `observe` reads."""


@dataclass(order=True)
class Served:
    """A server's calls that a rank took part in: pairs and seconds of the server's kernel."""

    pairs: int = 0
    seconds: float = 0.0
    # Calls of core attentions whose calls never began while the rank had another one under way.
    alone: int = 0
    travel_s: float = (
        0.0  # of the calls that were alone, without the kernel: rows travel there and back
    )


@dataclass
class Observed:
    """Times of attention that a rank saw since the speeds were last corrected: pairs and seconds of its own kernel."""

    calls: int = 0  # attentions of a nano-batch that servers took part in
    pairs: int = 0
    seconds: float = 0.0
    between_s: float = 0.0  # time that the rank worked outside of attention while servers computed
    servers: dict[int, Served] = field(default_factory=dict)  # by id


def observe(spans: Sequence[Span]) -> Observed:
    """Return the times of attention in one rank's spans of `OBSERVED`, which are in the order of recording."""
    observed = Observed()
    # Core attentions whose calls began while others were under way: calls and phases are on
    # different clocks.
    shared = set[Work | None]()
    under_way, until = 0, None
    # Phases of a repair lie within another one.
    for phase in sorted(
        (span for span in spans if span.kind == "phase"), key=lambda span: span.begin
    ):
        if under_way and until is not None:
            observed.between_s += max(phase.begin - until, 0.0)
        until = phase.end if until is None else max(until, phase.end)
        if TO_SERVERS in phase.part:
            if under_way:
                shared.add(phase.work)
            under_way += 1
        if FROM_SERVERS in phase.part:
            observed.calls += 1
            under_way = max(under_way - 1, 0)
    calls: dict[str, Span] = {}  # the latest by server
    for span in spans:
        if span.kind == "kernel":
            observed.pairs += span.pairs
            observed.seconds += span.end - span.begin
        elif span.kind == "call":
            calls[span.part] = span
        elif span.kind == "server":
            served = observed.servers.setdefault(int(span.part), Served())
            served.pairs += span.pairs
            served.seconds += span.end - span.begin
            call = calls.pop(span.part, None)
            if call is not None and span.work not in shared:
                served.alone += 1
                # The clocks of two hosts need not run alike.
                served.travel_s += max((call.end - call.begin) - (span.end - span.begin), 0.0)
    return observed


class Speeds:
    """Speeds of ranks and servers, the same on every rank.

    `own` is the ranks' mean of `measure_speed`.
    """

    def __init__(self, own: float) -> None:
        self._own = DIRECTIONS * own  # as observed
        self._base_load = (
            0.0  # of a rank, in pairs that it computes, for one attention of a nano-batch
        )
        self._relative: dict[int, float] = {}  # of servers, to the ranks' mean
        self._travel: dict[
            int, float
        ] = {}  # of rows to servers and back, in pairs of a rank, for one attention

    @property
    def pairs_per_second(self) -> float:
        """Mean speed of the ranks, as `measure_speed` counts pairs."""
        return self._own / DIRECTIONS

    def joined(self, server: int, measured: float) -> float:
        """Note a server that takes part, by its `measure_speed`, and return its speed relative to a rank."""
        self._relative[server] = DIRECTIONS * measured / self._own
        self._travel[server] = 0.0
        return self._relative[server]

    def learn(self, observed: Sequence[Observed]) -> None:
        """Correct speeds and base loads by what the ranks saw."""
        seconds, pairs = (
            sum(seen.seconds for seen in observed),
            sum(seen.pairs for seen in observed),
        )
        own = self._own
        if seconds > 0 and pairs:
            own = pairs / seconds
            self._own += SMOOTHING * (own - self._own)
        if calls := sum(seen.calls for seen in observed):
            between = sum(seen.between_s for seen in observed) / calls
            self._base_load += SMOOTHING * (between * own - self._base_load)
        for server in self._relative:
            parts = [seen.servers[server] for seen in observed if server in seen.servers]
            # Every rank saw some of a server's calls, and each of these whole.
            most = max(parts, default=Served())
            if most.seconds > 0:
                seen_speed = most.pairs / most.seconds / own
                self._relative[server] += SMOOTHING * (seen_speed - self._relative[server])
            # Who sends first waits for the other ranks' rows; the shortest is that of the rank that
            # sent last.
            travel = [part.travel_s / part.alone for part in parts if part.alone]
            if travel:
                self._travel[server] += SMOOTHING * (min(travel) * own - self._travel[server])
            elif not parts:
                self._travel[server] *= 1 - FADING

    def workers(self, ranks: int, servers: Sequence[int], takes_turns: bool) -> Workers:
        """Return speeds and base loads of the ranks and of servers behind them.

        With two nano-batches in turns, a rank does its other work, and rows travel, while a server
        computes: the work is the rank's base load. Without turns a server does nothing while rows
        travel: its own base load.
        """
        base_load = self._base_load if takes_turns else 0.0
        travel = [0.0 if takes_turns else self._travel[server] for server in servers]
        speed = (1.0,) * ranks + tuple(self._relative[server] for server in servers)
        return Workers(speed, (base_load,) * ranks + tuple(travel))
