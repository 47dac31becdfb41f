"""Phase 3 of the joint layout: cuts of large documents move until the ranks that share one have equal pairs."""

import numpy as np

from hf_distca.planner.cost import row_reaching
from hf_distca.planner.joint.placement import Placement, Segment


def cut_again(placement: Placement) -> None:
    """Move the cuts of every piece, where that leaves nothing to balance there."""
    home, rows = np.array(placement.home, np.int64), placement.uncut_rows()
    whole_rows = np.bincount(home[home >= 0], rows[home >= 0], placement.limits.ranks).tolist()
    chains: dict[int, list[int]] = {}
    for at, (index, start, stop, rank) in enumerate(placement.cuts):
        # Segments from the end on, each beginning where the one before it stops; heads are none of them.
        chain = chains.setdefault(index, [])
        _, before, _, other = placement.cuts[chain[-1]] if chain else (index, stop, 0, -1)
        if start and stop == before and rank != other:
            chain.append(at)
    for chain in chains.values():
        if len(chain) > 1:
            _level(placement, chain, whole_rows)


def _level(placement: Placement, chain: list[int], whole_rows: list[float]) -> None:
    """Give the ranks of some segments, that follow each other in one piece, equal pairs.

    Args:
        placement: whose cuts move.
        chain: indices into its `cuts`.
        whole_rows: [ranks] rows that each rank has of whole documents.
    """
    limits, cuts = placement.limits, placement.cuts
    share = sum(placement.need[cuts[at][3]] for at in chain) / len(chain)
    if abs(share) > limits.mean * limits.slack:  # one rank's large surplus or room costs fewer bytes than many small
        return
    index, first, stop, _ = cuts[chain[-1]]
    stop = cuts[chain[0]][2]
    moved: list[Segment] = []
    for at in chain:
        _, old_start, old_stop, rank = cuts[at]
        amount = limits.pairs(old_start, old_stop) + placement.need[rank] - share
        below = limits.pairs(0, stop) - amount
        start = limits.cut_near(int(row_reaching(below, limits.window)), first + limits.block)
        start = first if at == chain[-1] else start
        # What a rank gains must be in the room that its whole documents leave.
        gained = (stop - start) - (old_stop - old_start)
        if start >= stop or gained > placement.room[rank] + whole_rows[rank]:
            return
        moved.append((index, start, stop, rank))
        stop = start
    for at, segment in zip(chain, moved, strict=True):
        for (_, start, stop, rank), sign in ((cuts[at], 1), (segment, -1)):
            placement.room[rank] += sign * (stop - start)
            placement.need[rank] += sign * limits.pairs(start, stop)
        cuts[at] = segment
