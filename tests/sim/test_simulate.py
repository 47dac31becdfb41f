"""Figures of ways to train, of documents so short that they can be counted by hand: a pair takes a second."""

import numpy as np
import pytest

from hf_distca.plan import AttentionKind
from hf_distca.planner.seconds import KernelCost, LinkCost, Links
from hf_distca.planner.settings import PlanSettings
from hf_distca.sim.costs import DeviceProfile
from hf_distca.sim.model import ModelShape
from hf_distca.sim.simulate import simulate
from hf_distca.sim.ways import Setup

KIND = AttentionKind(None, 2, 1, 4, 4)
MODEL = ModelShape({KIND: 3}, hidden=8, before=5, after=6, head=7, parameters=1000)
FREE = Links(LinkCost(0, np.inf), LinkCost(0, np.inf))
PROFILE = DeviceProfile(
    "unit", "a pair takes a second", "float32", KIND, KernelCost(0, 0, 0, 1.0), KernelCost(0, 0, 0, 2.0),
    np.inf, np.inf, 10.0, FREE, FREE,
)  # fmt: skip
SETUP = Setup(MODEL, PROFILE, ranks=2, tokens_per_rank=8)
SETTINGS = PlanSettings(2, 8, kinds=(KIND,), balance_block_size=1)


def figures_of(micro_batches, setup=SETUP, memory=None):
    lengths = [np.array(documents) for documents in micro_batches]
    found = simulate(lengths, setup, SETTINGS, len(lengths), memory=memory)
    return found, {way.name: way for way in found.ways}


def test_operations_of_the_model_over_what_gpus_could_do():
    _, ways = figures_of([[4, 4]])
    matrices, attention = 2 * (3 * (5 + 6) + 7) * 8, 2 * 3 * 2 * (4 + 4) * (10 + 10)
    seconds = 3 * (1 + 2) * 10  # of both ranks
    assert ways["plain packing"].step_seconds == seconds
    assert ways["plain packing"].mfu == pytest.approx(3 * (matrices + attention) / seconds / 2 / 10.0)
    assert ways["plain packing"].tokens_per_second == pytest.approx(8 / seconds)


def test_memory_is_asked_for_the_plan_whose_busiest_rank_exchanges_the_most():
    asked = {}

    def memory(way, rows, plan):
        asked[way.name] = rows, plan and [nano.layout.lengths.tolist() for nano in plan.nano_batches]
        return 7, None if way.context > 1 else 5

    _, ways = figures_of([[2, 2], [16], [4, 4, 4, 4]], memory=memory)
    assert {name: asked[name] for name in asked if name.startswith("hf_distca")} == {
        f"hf_distca, {layout}": (8, [[16]]) for layout in ("fixed", "joint", "chosen")
    }
    assert asked["plain packing"] == (8, None)
    assert {(way.rows_bytes, way.state_bytes) for way in ways.values()} == {(7, 5), (7, None)}
    assert figures_of([[8, 8]])[1]["plain packing"].rows_bytes is None


def test_gains_and_their_spread_over_micro_batches():
    found, ways = figures_of([[12, 4], [4, 4, 4, 4]])
    for gain in (found.over_packing, found.over_best):
        ratio = ways[gain.name].step_seconds / ways[found.best_planned].step_seconds
        assert gain.speed_up == pytest.approx(ratio)
        assert gain.least <= gain.speed_up <= gain.most
    assert (found.over_packing.name, found.over_best.name) == ("plain packing", found.best_plain)
    alone = [figures_of([documents])[0].over_packing.speed_up for documents in ([12, 4], [4, 4, 4, 4])]
    assert [found.over_packing.least, found.over_packing.most] == pytest.approx(sorted(alone))


def test_the_best_plain_way_cuts_the_fewest_documents():
    found, ways = figures_of([[12, 4]])
    assert ways["whole documents balanced"].documents_cut == 0.5
    assert ways["whole documents balanced"].step_seconds < ways["context parallel, 1 × 2"].step_seconds
    assert found.best_plain == "context parallel, 1 × 2"
    assert found.speed_up == pytest.approx(
        ways["context parallel, 1 × 2"].step_seconds / ways[found.best_planned].step_seconds
    )
