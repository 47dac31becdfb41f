"""The speed-up over the number of ranks, with the same tokens on each."""

from collections.abc import Callable
from dataclasses import dataclass

from hf_distca.sim.figures import Simulation

LEAST_RANKS = 8


@dataclass(frozen=True)
class ScalePoint:
    """The best ways on so many ranks.

    Attributes:
        ranks: how many train.
        best_plain: name of the best way without plans.
        best_planned: name of the best planned one.
        plain_seconds: a step of the former.
        planned_seconds: a step of the latter.
        speed_up: the former over the latter.
        attention_speed_up: the same of the busiest rank's core attention alone.
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
        """What a simulation came to."""
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
    """Figures of as many ranks as were simulated, and of a half, a quarter ... of them: at least 8 and of whole nodes,
    or of at least 2 where there are no more than 8.

    Args:
        result: of all ranks.
        simulated: simulates so many ranks.
        ranks_per_node: of a whole node; None where nodes differ, of which no fewer are taken.
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
