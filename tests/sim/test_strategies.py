from dataclasses import replace

import numpy as np
import pytest

from hf_distca.plan import AttentionKind
from hf_distca.planner.seconds import KernelCost, LinkCost, Links
from hf_distca.planner.settings import PlanSettings
from hf_distca.sim.costs import DeviceProfile
from hf_distca.sim.model import ModelShape
from hf_distca.sim.strategies import Setup, data_and_context_parallel, plain, planned

KIND = AttentionKind(None, 2, 1, 4, 4)
MODEL = ModelShape({KIND: 3}, hidden=8, before=0, after=0, head=0, parameters=0)
FREE = Links(LinkCost(0, np.inf), LinkCost(0, np.inf))
PROFILE = DeviceProfile(
    "unit", "a pair takes a second", "float32", KIND, KernelCost(0, 0, 0, 1.0), KernelCost(0, 0, 0, 2.0),
    1.0, np.inf, 1.0, FREE, FREE,
)  # fmt: skip
SETUP = Setup(MODEL, PROFILE, ranks=2, tokens_per_rank=8)
PER_PAIR = 3 * (1 + 2)


def test_rows_of_equal_tokens():
    step = plain(np.array([4, 2, 2, 2]), SETUP)  # 4 and 2, 2 and 2
    assert step.seconds == PER_PAIR * 13
    assert step.attention.mean() == PER_PAIR * (13 + 6) / 2
    assert (step.tokens_most, step.documents_cut) == (6, 0)


def test_what_a_rank_cannot_hold_is_cut():
    step = plain(np.array([10]), SETUP)
    assert step.documents_cut == 1
    assert step.seconds == PER_PAIR * 36  # 8 rows of ten


def test_whole_documents_balanced():
    step = data_and_context_parallel(np.array([6, 4, 4, 2]), SETUP, 1)
    assert step.seconds == PER_PAIR * (21 + 3)  # 6 and 2, 4 and 4
    assert step.tokens_most == 8


def test_context_parallelism_shares_every_document_and_gathers_keys():
    setup = replace(SETUP, profile=replace(PROFILE, links=Links(LinkCost(0, 1.0), FREE.between)), ranks_per_node=2)
    step = data_and_context_parallel(np.array([8]), setup, 2)
    row_bytes = 4 * (4 + 4)
    assert step.attention.tolist() == [PER_PAIR * 36 / 2] * 2
    assert step.waited.max() == 3 * 3 * 4 * row_bytes
    assert step.bytes_bottleneck == 4 * row_bytes


@pytest.mark.parametrize("layout", ["joint", "fixed"])
def test_planned_attention_on_free_links_takes_the_mean(layout):
    lengths = np.array([1500, 200, 120, 90, 70, 60])
    setup = replace(SETUP, ranks=4, tokens_per_rank=512)
    settings = PlanSettings(4, 512, kinds=(KIND,), document_layout=layout, balance_block_size=16)
    step, plan = planned(lengths, setup, settings)
    assert step.attention.max() == pytest.approx(PER_PAIR * float((lengths * (lengths + 1) / 2).sum()) / 4, rel=0.015)
    assert step.seconds == pytest.approx(step.attention.max(), rel=1e-6)
    assert plan.summary.max_over_mean < 1.011


@pytest.mark.parametrize(("ranks_per_node", "place"), [(2, "within"), (1, "between")])
def test_planned_steps_take_the_exchange_and_no_collectives(ranks_per_node, place):
    slow = replace(FREE, **{place: LinkCost(1e4, np.inf)})  # nothing hides it
    settings = PlanSettings(2, 8, kinds=(KIND,), balance_block_size=1, ranks_per_node=ranks_per_node)

    def seconds(**profile):
        setup = replace(SETUP, profile=replace(PROFILE, **profile), ranks_per_node=ranks_per_node)
        return planned(np.array([16]), setup, settings)[0].seconds

    assert seconds(links=slow) == seconds()
    assert seconds(exchange=slow) > seconds()


def test_servers_take_their_share():
    lengths = np.array([1500, 200, 120, 90, 70, 60])
    setup = replace(SETUP, ranks=4, tokens_per_rank=512)
    settings = PlanSettings(4, 512, kinds=(KIND,), balance_block_size=16)
    alone, _ = planned(lengths, setup, settings)
    helped, _ = planned(lengths, setup, settings, servers=2)
    assert helped.attention.max() == pytest.approx(alone.attention.max() * 4 / 6, rel=0.05)
    assert helped.seconds < alone.seconds


def test_keys_are_read_by_each_part_of_a_document():
    keys = replace(PROFILE, forward=KernelCost(0, 0, 1.0, 0), backward=KernelCost(0, 0, 0, 0))
    setup = replace(SETUP, profile=keys, tokens_per_rank=16)
    assert plain(np.array([16, 8]), setup).seconds == 3 * 16
    # Four parts of 4 rows read 4, 8, 12 and 16 keys.
    assert data_and_context_parallel(np.array([16]), setup, 2).attention.max() == 3 * (4 + 8 + 12 + 16) / 2
