"""Routes carried out by hand: every row of every rank in Python dictionaries, sent, computed and returned.

A row is what it is, (document, row): the value of a Q row, and of a K/V row, is its name. Attention of a query row
gives the list of K/V rows that it saw. Its gradient gives every K/V row the list of queries that saw it.
"""

from collections import defaultdict

import numpy as np

from hf_distca.planner.routes import make_routes


def routes_of(plan):
    """The routes of every worker."""
    return [make_routes(plan, worker) for worker in range(plan.workers)]


def local_rows(plan, worker):
    """{local row: (document, row)} of the rows that a worker holds, none for a server."""
    held = plan.layout.of_rank(worker).tolist()
    return {
        offset + row - start: (document, row)
        for document, start, stop, _, offset in held
        for row in range(start, stop)
    }


def messages_of(routes, stage, hop=1):
    """The messages of every worker: of queries, or of the keys of a stage in one of two hops."""
    if stage == "queries":
        return [mine.queries for mine in routes]
    return [mine.stages[stage].keys if hop == 1 else mine.stages[stage].forwarded for mine in routes]


def exchange(routes, stage, values):
    """What every worker receives, "queries" or the keys of a stage: {received row: (worker, local row, value)}.

    Args:
        values: for each worker {local row: value}.
    """
    received = [{} for _ in routes]
    for source, target, row in sent_rows(messages_of(routes, stage)):
        received[target][len(received[target])] = (source, row, values[source][row])
    if stage != "queries":
        first = [dict(rows) for rows in received]
        for source, target, row in sent_rows(messages_of(routes, stage, hop=2)):
            received[target][len(received[target])] = first[source][row]
    return received


def sent_rows(messages):
    """(source, target, number of the row at the source) of every row, in the order in which each target has them."""
    for source, theirs in enumerate(messages):
        assert theirs.send_counts.sum() == len(theirs.send_rows)
        sent = np.split(theirs.send_rows, np.cumsum(theirs.send_counts)[:-1])
        for target, rows in enumerate(sent):
            assert messages[target].recv_counts[source] == len(rows)
            for row in rows.tolist():
                yield source, target, row


def tasks_of(group):
    """[(q_rows, k_rows, pairs)] of each task of a group, as lists of numbers of rows."""
    q_rows = np.split(group.q_rows, np.cumsum(group.q_lens)[:-1]) if len(group.q_lens) else []
    k_rows = np.split(group.k_rows, np.cumsum(group.k_lens)[:-1]) if len(group.k_lens) else []
    assert group.q_lens.sum() == len(group.q_rows)
    assert group.k_lens.sum() == len(group.k_rows)
    return list(
        zip([q.tolist() for q in q_rows], [k.tolist() for k in k_rows], group.task_pairs.tolist(), strict=True)
    )


def visible(queries, keys, window, causal):
    """[(query, key)] that a kernel computes: all of them, or bottom-right causal with a window."""
    for i, query in enumerate(queries):
        place = len(keys) - len(queries) + i  # of the query's own key
        for j, key in enumerate(keys):
            if not causal or (j <= place and (window is None or place - j < window)):
                yield query, key


def carried_out(plan):
    """Attention and its gradient by the routes of all workers.

    Returns:
        For each rank {local row: K/V rows that its query saw} and {local row: queries that saw its K/V row}.
    """
    routes = routes_of(plan)
    stages = range(len(routes[0].stages))
    assert all(len(mine.stages) == len(stages) for mine in routes)
    local = [local_rows(plan, worker) for worker in range(plan.workers)]
    queries, *keys = (exchange(routes, stage, local) for stage in ("queries", *stages))
    seen = [defaultdict(list) for _ in routes]
    seen_by = [defaultdict(list) for _ in routes]
    for worker, mine in enumerate(routes):
        assert mine.local_rows == len(local[worker])
        # (rank, local row, value) of what the numbers of a group stand for; results go to that rank and row.
        held = {row: (worker, row, value) for row, value in local[worker].items()}
        calls = [(mine.local, held, held, True)]
        for stage, theirs in zip(mine.stages, keys, strict=True):
            calls += [
                (stage.remote_kv, held, theirs[worker], plan.window is not None),
                (stage.remote_query, queries[worker], theirs[worker], True),
                (stage.remote_query_prefix, queries[worker], theirs[worker], False),
            ]
        for group, asking, asked, causal in calls:
            for q_rows, k_rows, pairs in tasks_of(group):
                counted = 0
                for query, key in visible(q_rows, k_rows, plan.window, causal):
                    q_rank, q_row, q_value = asking[query]
                    k_rank, k_row, k_value = asked[key]
                    seen[q_rank][q_row].append(k_value)
                    seen_by[k_rank][k_row].append(q_value)
                    counted += 1
                assert pairs == counted
        for group, *_ in calls:  # else results would be written to a row twice at once
            assert len(set(group.q_rows.tolist())) == len(group.q_rows)
        # Nothing travels that is not used, and nothing twice.
        asking = {
            row for stage in mine.stages for row in (*stage.remote_query.q_rows, *stage.remote_query_prefix.q_rows)
        }
        assert asking == set(queries[worker])
        for stage, theirs in zip(mine.stages, keys, strict=True):
            groups = (stage.remote_query, stage.remote_query_prefix, stage.remote_kv)
            assert {row for group in groups for row in group.k_rows.tolist()} == set(theirs[worker])
        for received in (queries, *keys):
            came = [(rank, row) for rank, row, _ in received[worker].values()]
            assert len(set(came)) == len(came)
        if plan.window is None:
            came = [(rank, row) for theirs in keys for rank, row, _ in theirs[worker].values()]
            assert len(set(came)) == len(came)
        assert all(rank != worker for rank, *_ in queries[worker].values())
    _check_hops(plan, routes)
    return seen, seen_by


def _check_hops(plan, routes):
    """Where a plan knows of nodes, a K/V row crosses to a node once (in a stage, with a window), and all that ranks do
    beyond that is to forward it inside nodes."""
    ranks, node = plan.layout.ranks, plan.nodes
    crossed = defaultdict(set)
    for stage in range(len(routes[0].stages)):
        of_stage = stage if plan.window else None
        for source, target, row in sent_rows(messages_of(routes, stage)):
            if node and target < ranks and node[source] != node[target]:
                assert (source, row) not in crossed[of_stage, node[target]]
                crossed[of_stage, node[target]].add((source, row))
        passed = list(sent_rows(messages_of(routes, stage, hop=2)))
        assert all(node[source] == node[target] and source != target < ranks for source, target, _ in passed)
        assert {mine.stages[stage].forwarded.crossing for mine in routes} == {bool(passed)}


def check(plan):
    """Every query sees exactly the keys that it must, each once, and every key gets back exactly its queries."""
    seen, seen_by = carried_out(plan)
    for rank in range(plan.workers):
        local = local_rows(plan, rank)
        wanted_keys, wanted_queries = {}, {}
        for number, (document, row) in local.items():
            reach = plan.window or row + 1
            wanted_keys[number] = [(document, key) for key in range(max(row - reach + 1, 0), row + 1)]
            last = plan.layout.lengths[document] if plan.window is None else row + plan.window
            queries = range(row, min(last, plan.layout.lengths[document]))
            wanted_queries[number] = [(document, query) for query in queries]
        assert {number: sorted(keys) for number, keys in seen[rank].items()} == wanted_keys
        assert {number: sorted(queries) for number, queries in seen_by[rank].items()} == wanted_queries
