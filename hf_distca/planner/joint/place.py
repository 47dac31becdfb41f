"""Placing documents so that ranks have equal tokens and equal pairs at once, with few and cheap cuts.

Only cut documents cost bytes: rows from row s on need K/V rows [0, s) of their document. So:

1. A document too large for one rank is cut from its end: each segment as large as its rank can take beside
   the shortest documents, which leaves every cut as early in the document as possible (cut_large.py).
2. The rest stays whole, longest first, on the rank whose remaining pairs per remaining token are highest
   (place_whole.py).
3. Ranks then differ by less than a short document. The ends of short documents make their tokens equal
   (even_out.py).

What pairs still differ is left to `balance`.
"""

import numpy as np
from numpy.typing import NDArray

from hf_distca.planner.joint.cut_large import cut_large
from hf_distca.planner.joint.even_out import even_out
from hf_distca.planner.joint.place_whole import place_whole
from hf_distca.planner.joint.placement import Placement


def place(placement: Placement) -> NDArray[np.int64]:
    """Place all rows, on every rank as many as it has room for.

    Args:
        placement: of which nothing is placed yet.

    Returns:
        [segments, 4] int64: document, start, stop and rank of each segment, in no order.
    """
    cut_large(placement)
    spare = place_whole(placement)
    even_out(placement, spare)
    return placement.segments()
