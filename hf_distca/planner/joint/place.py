"""Placement of documents with equal tokens and equal pairs on all ranks, and with few and cheap cuts.

Only cut documents cost bytes: rows from row s on need K/V rows [0, s) of their document. So there are three phases:

1. A document too large for one rank is cut from its end (cut_large.py). Each segment is as large as its rank can take
   beside the shortest documents. So every cut lies as early in the document as possible.
2. Other documents stay whole. Longest first, each goes to the rank with the most missing pairs per missing token
   (place_whole.py).
3. Ranks then differ by less than a short document. The ends of short documents make their tokens equal (even_out.py).

The remaining differences in pairs are left to `balance`.
"""

import numpy as np
from numpy.typing import NDArray

from hf_distca.planner.joint.cut_large import cut_large
from hf_distca.planner.joint.even_out import even_out
from hf_distca.planner.joint.place_whole import place_whole
from hf_distca.planner.joint.placement import Placement


def place(placement: Placement) -> NDArray[np.int64]:
    """Place all rows so that every rank is full.

    Returns:
        [segments, 4] int64: document, start, stop and rank of each segment, in no order.
    """
    cut_large(placement)
    spare = place_whole(placement)
    even_out(placement, spare)
    return placement.segments()
