"""Plans of all kinds, and their routes carried out by hand.

A row is what it is, (document, row): the value of a Q row, and of a K/V row, is its name. Attention
of a query row gives the list of K/V rows that it saw. Its gradient gives every K/V row the list of
queries that saw it.
"""

import itertools
from collections import defaultdict

import numpy as np
from hypothesis import strategies as st

from hf_distca.plan import SEGMENT, TASK, Branches, Layout, Plan
from hf_distca.plan.routes import make_routes
from tests.planner.plan_checks import rows_of


@st.composite
def drawn_branches(draw, own_lengths):
    """Every document but the first may continue an earlier one, after any of its own rows."""
    parents, starts = [], []
    for document in range(len(own_lengths)):
        parent = draw(st.integers(-1, document - 1))
        row = draw(st.integers(1, own_lengths[parent])) if parent >= 0 else 0
        parents.append(parent)
        starts.append(starts[parent] + row if parent >= 0 else 0)
    return Branches(np.array(parents, np.int64), np.array(starts, np.int64))


@st.composite
def drawn_plans(draw, most_ranks=4, most_servers=2, with_nodes=False, with_branches=False):
    """Plans of documents cut anywhere, their segments and tasks anywhere, perhaps on nodes of any
    sizes.
    """
    ranks = draw(st.integers(1, most_ranks))
    workers = ranks + draw(st.integers(0, most_servers))
    own_lengths = draw(st.lists(st.integers(1, 12), max_size=5))
    branches = draw(drawn_branches(own_lengths)) if with_branches else None
    starts = branches.starts.tolist() if branches else [0] * len(own_lengths)
    lengths = [start + length for start, length in zip(starts, own_lengths, strict=True)]
    held_rows, tasks = [], []
    for document, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        for pieces, most in ((held_rows, ranks - 1), (tasks, workers - 1)):
            rows = st.integers(start + 1, length)
            cuts = sorted(draw(st.sets(rows, max_size=4)) | {start, length})
            pieces += [
                (draw(st.integers(0, most)), document, *rows) for rows in itertools.pairwise(cuts)
            ]
    segments, filled = [], [0] * ranks
    for rank, document, start, stop in sorted(
        draw(st.permutations(held_rows)), key=lambda segment: segment[0]
    ):
        segments.append((document, start, stop, rank, filled[rank]))
        filled[rank] += stop - start
    layout = Layout(np.array(lengths, np.int64), np.array(segments, SEGMENT), ranks, branches)
    by_worker = [(document, start, stop, worker) for worker, document, start, stop in sorted(tasks)]
    nodes = (
        draw(st.lists(st.integers(0, 2), min_size=workers, max_size=workers)) if with_nodes else []
    )
    window = draw(st.sampled_from([None, 1, 2, 3, 5, 20]))
    return Plan(
        layout, np.array(by_worker, TASK), workers, window, nodes=tuple(sorted(nodes)) or None
    )


def plans_of_all_kinds():
    return (
        drawn_plans()
        | drawn_plans(most_ranks=6, with_nodes=True)
        | drawn_plans(with_branches=True)
        | drawn_plans(most_ranks=6, with_nodes=True, with_branches=True)
    )


def routes_of(plan):
    return [make_routes(plan, worker) for worker in range(plan.workers)]


def messages_of(routes, stage, hop=1):
    """The messages of every worker: of queries, or of the keys of a stage in one of two hops."""
    if stage == "queries":
        return [mine.queries for mine in routes]
    return [
        mine.stages[stage].keys if hop == 1 else mine.stages[stage].forwarded for mine in routes
    ]


def exchange(routes, stage, values):
    """What every worker receives, "queries" or the keys of a stage: [(worker, local row, value)] by
    received row.
    """
    received = [[] for _ in routes]
    for source, target, row in sent_rows(messages_of(routes, stage)):
        received[target].append((source, row, values[source][row]))
    if stage != "queries":
        first = [list(rows) for rows in received]
        for source, target, row in sent_rows(messages_of(routes, stage, hop=2)):
            received[target].append(first[source][row])
    return received


def sent_rows(messages):
    """(source, target, number of the row at the source) of every row, in the order in which each
    target has them.
    """
    for source, theirs in enumerate(messages):
        assert theirs.send_counts.sum() == len(theirs.send_rows)
        for target, rows in enumerate(
            np.split(theirs.send_rows, np.cumsum(theirs.send_counts)[:-1])
        ):
            assert messages[target].recv_counts[source] == len(rows)
            for row in rows.tolist():
                yield source, target, row


def visible(group, window, causal):
    """[(query, key)] that a kernel computes for a group: all of each task, or bottom-right causal
    with a window.
    """
    assert (group.q_lens.sum(), group.k_lens.sum()) == (len(group.q_rows), len(group.k_rows))
    visible_rows, q_end, k_end = [], 0, 0
    tasks = (array.tolist() for array in (group.q_lens, group.k_lens, group.task_pairs))
    for q_len, k_len, pairs in zip(*tasks, strict=True):
        q_end, k_end = q_end + q_len, k_end + k_len
        for i, j in itertools.product(range(-q_len, 0), range(-k_len, 0)):
            if not causal or (j <= i and (window is None or i - j < window)):
                visible_rows.append((int(group.q_rows[q_end + i]), int(group.k_rows[k_end + j])))
                pairs -= 1
        assert pairs == 0
    return visible_rows


def carried_out(plan):
    """Attention and its gradient by the routes of all workers.

    Returns:
        For each rank {local row: K/V rows that its query saw} and {local row: queries that saw its
        K/V row}.
    """
    routes = routes_of(plan)
    stages = range(len(routes[0].stages))
    assert all(len(mine.stages) == len(stages) for mine in routes)
    local = [
        rows_of(plan.layout.of_rank(worker)) for worker in range(plan.workers)
    ]  # of a server none
    queries, *keys = (exchange(routes, stage, local) for stage in ("queries", *stages))
    seen, seen_by = ([defaultdict(list) for _ in routes] for _ in range(2))
    for worker, mine in enumerate(routes):
        assert mine.local_rows == len(local[worker])
        # (rank, local row, value) of what the numbers of a group stand for; results go to that rank
        # and row.
        held_rows = [(worker, row, value) for row, value in enumerate(local[worker])]
        calls = [(mine.local, held_rows, held_rows, True)]
        asked_for = set()
        for stage, theirs in zip(mine.stages, keys, strict=True):
            calls += [
                (stage.remote_kv, held_rows, theirs[worker], plan.window is not None),
                (stage.remote_query, queries[worker], theirs[worker], True),
                (stage.remote_query_prefix, queries[worker], theirs[worker], False),
            ]
            # Servers compute these tasks alone.
            assert worker < plan.layout.ranks or not len(stage.remote_query_prefix.q_lens)
            # Nothing travels that is not used, and nothing twice.
            assert {row for group, *_ in calls[-3:] for row in group.k_rows} == set(
                range(len(theirs[worker]))
            )
            asked_for |= {row for group, *_ in calls[-2:] for row in group.q_rows}
        assert asked_for == set(range(len(queries[worker])))
        assert all(rank != worker for rank, *_ in queries[worker])
        rows_of_exchange = [theirs[worker] for theirs in keys]
        # With a window, rows that windows of two stages reach travel twice.
        exchanges = [
            queries[worker],
            *(rows_of_exchange if plan.window else [list(itertools.chain(*rows_of_exchange))]),
        ]
        assert all(
            len({row[:2] for row in rows_of_exchange}) == len(rows_of_exchange)
            for rows_of_exchange in exchanges
        )
        for group, asking, asked, causal in calls:
            # Else results would be written to a row twice at once.
            assert len(set(group.q_rows.tolist())) == len(group.q_rows)
            for query, key in visible(group, plan.window, causal):
                q_rank, q_row, q_value = asking[query]
                k_rank, k_row, k_value = asked[key]
                seen[q_rank][q_row].append(k_value)
                seen_by[k_rank][k_row].append(q_value)
    _check_hops(plan, routes)
    return seen, seen_by


def _check_hops(plan, routes):
    """Where a plan knows of nodes, a K/V row crosses to a node once (in a stage, with a window),
    and all that ranks do beyond that is to forward it inside nodes."""
    ranks, node = plan.layout.ranks, plan.nodes
    crossed = []
    for stage in range(len(routes[0].stages)):
        crossed += [
            (stage if plan.window else None, node[target], source, row)
            for source, target, row in sent_rows(messages_of(routes, stage))
            if node and target < ranks and node[source] != node[target]
        ]
        passed = list(sent_rows(messages_of(routes, stage, hop=2)))
        assert all(
            node[source] == node[target] and source != target < ranks
            for source, target, _ in passed
        )
        assert {mine.stages[stage].forwarded.crossing for mine in routes} == {bool(passed)}
    assert len(set(crossed)) == len(crossed)


def check(plan):
    """Every query sees exactly the keys that it must, each once, and every key gets back exactly
    its queries.
    """
    seen, seen_by = carried_out(plan)
    queries = defaultdict(list)  # of each key, the queries that see it
    for document, row in rows_of(plan.layout.segments):
        for key in keys_of(plan, document, row):
            queries[key].append((document, row))
    for rank in range(plan.workers):
        local = rows_of(plan.layout.of_rank(rank))
        for number, (document, row) in enumerate(local):
            assert sorted(seen[rank][number]) == sorted(keys_of(plan, document, row))
            assert sorted(seen_by[rank][number]) == sorted(queries[document, row])
        assert max([*seen[rank], *seen_by[rank]], default=-1) < len(local)


def keys_of(plan, document, row):
    """[(document, row)] that a row attends to: rows of its path up to itself, within the window."""
    branches, keys = plan.layout.branches, []
    first = max(row - (plan.window or row + 1) + 1, 0)
    while row >= first:
        assert document >= 0, "rows of a path lie in no document"
        start = int(branches.starts[document]) if branches else 0
        keys += [(document, key) for key in range(max(first, start), row + 1)]
        row = start - 1
        document = int(branches.parents[document]) if branches else -1
    return keys
