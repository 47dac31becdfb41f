"""Three nodes of 8, 8 and 4 ranks: what holds of every plan of them."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_distca.plan import AttentionKind
from hf_distca.planner.cost import Workers
from hf_distca.planner.metrics import loads_of
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.servers import plan_with_servers
from hf_distca.planner.settings import PlanSettings
from tests.planner.plan_checks import check_plan
from tests.planner.test_routes_carried_out import check

NODES = (8, 8, 4)
BLOCK, TOLERANCE = 4, 0.1
DOCUMENTS = st.lists(st.integers(1, 24) | st.sampled_from([60, 110]), min_size=1, max_size=12)


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("layout", ["joint", "fixed"])
@settings(max_examples=12)
@given(
    lengths=DOCUMENTS,
    server_nodes=st.lists(st.sampled_from([None, 0, 2]), max_size=2),
    ping_pong=st.booleans(),
    stage_rows=st.sampled_from([None, 12]),
)
def test_plans_of_uneven_nodes(layout, window, lengths, server_nodes, ping_pong, stage_rows):
    ranks, kind = sum(NODES), AttentionKind(window)
    tokens_per_rank = -(-sum(lengths) // ranks)
    planned = PlanSettings(
        ranks,
        tokens_per_rank,
        (kind,),
        document_layout=layout,
        balance_tolerance=TOLERANCE,
        balance_block_size=BLOCK,
        ping_pong=ping_pong,
        ranks_per_node=NODES,
    )
    micro_batch = plan_micro_batch(lengths, planned)
    assert micro_batch.tokens.max() == tokens_per_rank
    assert micro_batch.tokens.min() == sum(lengths) // ranks
    workers = Workers.uniform(ranks + len(server_nodes))
    if server_nodes:
        micro_batch = plan_with_servers(micro_batch, workers, planned, ranks_serve=True, server_nodes=server_nodes)
    for nano in micro_batch.nano_batches:
        plan = nano.plans[kind]
        assert plan.nodes[:ranks] == (0,) * 8 + (1,) * 8 + (2,) * 4
        of_servers = [3 if node is None else node for node in server_nodes]
        if of_servers == [3, 3]:  # each on one of its own
            of_servers = [3, 4]
        assert list(plan.nodes[ranks:]) == of_servers
        check_plan(plan)
        loads = loads_of(plan)
        most_of_a_row = min(int(nano.layout.lengths.max()), window or 10**9)
        assert loads.max() <= loads.mean() * (1 + TOLERANCE) + 2 * most_of_a_row
        # Every row sees its keys once, and a key crosses to a node once: with a window, once in a stage.
        check(replace(plan, stage_rows=stage_rows))
