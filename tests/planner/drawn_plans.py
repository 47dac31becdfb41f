"""Plans of all kinds: documents cut anywhere, their segments and tasks anywhere."""

import itertools
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from hf_distca.plan import SEGMENT, TASK, Layout, Plan


def cut(draw, length):
    """[(start, stop)] that cover rows [0, length)."""
    cuts = sorted(draw(st.sets(st.integers(1, length), max_size=4)) | {0, length})
    return list(itertools.pairwise(cuts))


@st.composite
def drawn_plans(draw, most_ranks=4, most_servers=2):
    ranks = draw(st.integers(1, most_ranks))
    workers = ranks + draw(st.integers(0, most_servers))
    lengths = draw(st.lists(st.integers(1, 12), max_size=5))
    held, tasks = [], []
    for document, length in enumerate(lengths):
        held += [(draw(st.integers(0, ranks - 1)), document, *rows) for rows in cut(draw, length)]
        tasks += [(draw(st.integers(0, workers - 1)), document, *rows) for rows in cut(draw, length)]
    segments, filled = [], [0] * ranks
    for rank, document, start, stop in sorted(draw(st.permutations(held)), key=lambda segment: segment[0]):
        segments.append((document, start, stop, rank, filled[rank]))
        filled[rank] += stop - start
    layout = Layout(np.array(lengths, np.int64), np.array(segments, SEGMENT), ranks)
    by_worker = [(document, start, stop, worker) for worker, document, start, stop in sorted(tasks)]
    return Plan(layout, np.array(by_worker, TASK), workers, draw(st.sampled_from([None, 1, 2, 3, 5, 20])))


@st.composite
def drawn_with_nodes(draw, most_ranks=6):
    """Plans that know of nodes, which have any numbers of ranks."""
    plan = draw(drawn_plans(most_ranks))
    nodes = draw(st.lists(st.integers(0, 2), min_size=plan.workers, max_size=plan.workers))
    return replace(plan, nodes=tuple(sorted(nodes)))


def plans_of_all_kinds():
    """Plans with nodes, and without."""
    return drawn_plans() | drawn_with_nodes()
