"""Speed-up over the number of ranks, with the same tokens on each rank."""

from collections.abc import Callable
from dataclasses import dataclass

from hf_distca.sim.figures import Simulation

LEAST_RANKS = 8


@dataclass(frozen=True)
class ScalePoint:
    """Best strategies on a number of ranks, the seconds of their steps, and their speed-up.

    Attributes:
        speed_up: `plain_seconds` over `planned_seconds`.
        attention_speed_up: the same ratio for the busiest rank's core attention.
    """

    ranks: int
    best_plain: str
    best_planned: str
    plain_seconds: float
    planned_seconds: float
    speed_up: float
    attention_speed_up: float

    @classmethod
    def of(cls, result: Simulation) -> "ScalePoint":
        """Return the point of a simulation."""
        steps = {way.name: way.step_seconds for way in result.ways}
        return cls(
            result.ranks,
            result.best_plain,
            result.best_planned,
            steps[result.best_plain],
            steps[result.best_planned],
            result.speed_up,
            result.attention_speed_up,
        )


def scaling(
    result: Simulation, simulated: Callable[[int], Simulation], ranks_per_node: int | None
) -> tuple[ScalePoint, ...]:
    """Return points for the simulated number of ranks and for a half, a quarter, … of it.

    Every point has at least 8 ranks and whole nodes. If no more than 8 ranks were simulated, every point has at least
    2.

    Args:
        ranks_per_node: ranks of a whole node; None if nodes differ, which leaves only the first point.
    """
    points = [ScalePoint.of(result)]
    if ranks_per_node is None:
        return tuple(points)
    least = LEAST_RANKS if result.ranks > LEAST_RANKS else 2
    ranks, rest = divmod(result.ranks, 2)
    while not rest and ranks >= least and not ranks % min(ranks_per_node, ranks):
        points.append(ScalePoint.of(simulated(ranks)))
        ranks, rest = divmod(ranks, 2)
    return tuple(reversed(points))
