"""Warn once, with a remedy, about each cause that keeps balancing from paying."""

import logging
from collections.abc import Mapping

from hf_distca.config import DistCAConfig
from hf_distca.trainer.metrics import PREFIX
from hf_distca.units import AUTO

logger = logging.getLogger(__name__)

STEPS = 50
"""Number of steps averaged for a warning: fewer steps depend too much on their documents."""
MOST_IMBALANCE, MOST_EXPOSED, LEAST_PING_PONG = 1.1, 0.1, 0.1
"""Limits beyond which a warning is logged: imbalance degree, share of waits, share of layers in turns."""
LOOKED_AT = ("imbalance_degree", "exposed_exchange_share", "ping_pong_share")


class Remedies:
    """Average figures over some fifty steps, and warn of each problem once."""

    def __init__(self, settings: DistCAConfig, *, ping_pong: bool) -> None:
        self._settings, self._ping_pong = settings, ping_pong
        self._told: set[str] = set()
        self._begin()

    def _begin(self) -> None:
        self._steps = 0
        self._sums = dict.fromkeys(LOOKED_AT, 0.0)

    def see(self, figures: Mapping[str, float], steps: int) -> None:
        """Add means over some steps, from `StepMeter.figures`; empty figures change nothing."""
        if not figures or not steps:
            return
        self._steps += steps
        for name in LOOKED_AT:
            self._sums[name] += figures[name] * steps
        if self._steps >= STEPS:
            means = {name: total / self._steps for name, total in self._sums.items()}
            self._begin()
            self._warn(means)

    def _warn(self, means: Mapping[str, float]) -> None:
        settings = self._settings
        if means["imbalance_degree"] > MOST_IMBALANCE and settings.balance_tolerance != AUTO:
            self._tell(
                f"{PREFIX}imbalance_degree is {means['imbalance_degree']:.2f}: the busiest rank computes that many "
                "times the mean core attention, and all ranks wait for it; set balance_tolerance to 0.01 (it is "
                f"{settings.balance_tolerance}), lower balance_block_size (it is {settings.balance_block_size}), "
                "or raise tokens_per_rank",
                "imbalance_degree",
            )
        if means["exposed_exchange_share"] > MOST_EXPOSED:
            self._tell(
                f"{PREFIX}exposed_exchange_share is {means['exposed_exchange_share']:.2f}: a rank waits for rows "
                f"during that share of a step; leave ping_pong (it is {settings.ping_pong}) and balance_tolerance (it "
                f"is {settings.balance_tolerance}) at 'auto', check links and nodes with hf-distca doctor, and find "
                "the long waits with trace_steps=3",
                "exposed_exchange_share",
            )
        if self._ping_pong and settings.ping_pong is True and means["ping_pong_share"] < LEAST_PING_PONG:
            self._tell(
                f"{PREFIX}ping_pong_share is {means['ping_pong_share']:.2f}: few micro-batches run as two "
                "nano-batches, so exchanges are not hidden; raise tokens_per_rank until no document has more than "
                "half of a micro-batch's tokens, and put hooks on decoder layers, not inside them",
                "ping_pong_share",
            )

    def _tell(self, text: str, name: str) -> None:
        if name not in self._told:
            self._told.add(name)
            logger.warning("mean of the last steps: %s", text)
