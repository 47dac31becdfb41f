"""Steps and figures of strategies, of documents so short that they can be counted by hand: a pair
takes a second.
"""

from dataclasses import fields, replace

import numpy as np
import pytest

from hf_distca.plan import AttentionKind
from hf_distca.planner.settings import PlanSettings
from hf_distca.predict.profile import DeviceProfile
from hf_distca.predict.seconds import KernelCost, LinkCost, Links
from hf_distca.predict.setup import Setup
from hf_distca.predict.shapes import ModelShape
from hf_distca.sim.simulate import DRAWN_FOR_RANKS, StrategyFigures, advice, simulate
from hf_distca.sim.strategies import data_and_context_parallel, plain, planned

KIND = AttentionKind(None, 2, 1, 4, 4)
MODEL = ModelShape(
    {KIND: 3}, hidden=8, before_attention=5, after_attention=6, head=7, parameters=1000
)
FREE = Links(LinkCost(0, np.inf), LinkCost(0, np.inf))
PROFILE = DeviceProfile(
    "unit", "a pair takes a second", "float32",
    KIND, KernelCost(0, 0, 0, 1.0), KernelCost(0, 0, 0, 2.0),
    np.inf, np.inf, 10.0, FREE, FREE,
)  # fmt: skip
SETUP = Setup(MODEL, PROFILE, ranks=2, tokens_per_rank=8)
SETTINGS = PlanSettings(2, 8, kinds=(KIND,), balance_block_size=1)
PER_PAIR = 3 * (1 + 2)


def test_steps_without_plans():
    step = plain(np.array([4, 2, 2, 2]), SETUP)  # 4 and 2, 2 and 2
    assert step.seconds == PER_PAIR * 13
    assert step.attention.mean() == PER_PAIR * (13 + 6) / 2
    assert (step.tokens_most, step.documents_cut) == (6, 0)
    step = plain(np.array([10]), SETUP)
    assert (step.seconds, step.documents_cut) == (PER_PAIR * 36, 1)  # 8 rows of ten
    step = data_and_context_parallel(np.array([6, 4, 4, 2]), SETUP, 1)
    assert (step.seconds, step.tokens_most) == (PER_PAIR * (21 + 3), 8)  # 6 and 2, 4 and 4


def test_context_parallelism_shares_every_document_and_gathers_keys():
    setup = replace(
        SETUP,
        profile=replace(PROFILE, links=Links(LinkCost(0, 1.0), FREE.between)),
        ranks_per_node=2,
    )
    step = data_and_context_parallel(np.array([8]), setup, 2)
    row_bytes = 4 * (4 + 4)
    assert step.attention.tolist() == [PER_PAIR * 36 / 2] * 2
    assert step.waited.max() == 3 * 3 * 4 * row_bytes
    assert step.bytes_bottleneck == 4 * row_bytes
    of_two_groups = data_and_context_parallel(np.array([8, 2]), replace(setup, ranks=4), 2)
    assert of_two_groups.attention.tolist() == [PER_PAIR * pairs / 2 for pairs in (36, 36, 3, 3)]
    # Of 16 rows four parts read 4, 8, 12 and 16 keys.
    keys = replace(PROFILE, forward=KernelCost(0, 0, 1.0, 0), backward=KernelCost(0, 0, 0, 0))
    setup = replace(SETUP, profile=keys, tokens_per_rank=16)
    assert plain(np.array([16, 8]), setup).seconds == 3 * 16
    assert (
        data_and_context_parallel(np.array([16]), setup, 2).attention.max()
        == 3 * (4 + 8 + 12 + 16) / 2
    )
    # On the causal diagonal a row has its task's rows, at most 512.
    diagonal = replace(
        PROFILE, forward=KernelCost(0, 0, 0, 0, 1.0), backward=KernelCost(0, 0, 0, 0)
    )
    setup = replace(SETUP, profile=diagonal, tokens_per_rank=600)
    assert plain(np.array([600, 8]), setup).seconds == 3 * 600 * 512
    assert data_and_context_parallel(np.array([16]), setup, 2).attention.max() == 3 * 16 * 4 / 2
    # A whole document is one task. A document shared by two ranks is four, or as many as it has
    # rows.
    of_tasks = replace(
        PROFILE, forward=KernelCost(0, 0, 0, 0, task=1.0), backward=KernelCost(0, 0, 0, 0)
    )
    setup = replace(SETUP, profile=of_tasks, tokens_per_rank=32)
    assert plain(np.array([16, 8, 8, 32]), setup).attention.tolist() == [3, 3 * 3]
    assert (
        data_and_context_parallel(np.array([16, 8, 3]), setup, 2).attention.tolist()
        == [3 * (4 + 4 + 3) / 2] * 2
    )


@pytest.mark.parametrize("layout", ["joint", "fixed"])
def test_planned_attention_on_free_links_takes_the_mean_and_servers_their_share(layout):
    lengths, setup = (
        np.array([1500, 200, 120, 90, 70, 60]),
        replace(SETUP, ranks=4, tokens_per_rank=512),
    )
    settings = PlanSettings(4, 512, kinds=(KIND,), document_layout=layout, balance_block_size=16)
    step, plan = planned(lengths, setup, settings)
    mean = PER_PAIR * float((lengths * (lengths + 1) / 2).sum()) / 4
    assert step.attention.max() == pytest.approx(mean, rel=0.015)
    assert step.seconds == pytest.approx(step.attention.max(), rel=1e-6)
    assert plan.summary.max_over_mean < 1.011
    helped, _ = planned(lengths, setup, settings, servers=2)
    assert helped.attention.max() == pytest.approx(mean * 4 / 6, rel=0.05)
    assert helped.seconds < step.seconds


@pytest.mark.parametrize(("ranks_per_node", "place"), [(2, "within"), (1, "between")])
def test_planned_steps_take_the_exchange_and_no_collectives(ranks_per_node, place):
    slow = replace(FREE, **{place: LinkCost(1e4, np.inf)})  # nothing hides it
    settings = PlanSettings(
        2, 8, kinds=(KIND,), balance_block_size=1, ranks_per_node=ranks_per_node
    )

    def seconds(**profile):
        setup = replace(SETUP, profile=replace(PROFILE, **profile), ranks_per_node=ranks_per_node)
        return planned(np.array([16]), setup, settings)[0].seconds

    assert seconds(links=slow) == seconds()
    assert seconds(exchange=slow) > seconds()


def figures_of(micro_batches, **memory):
    lengths = [np.array(documents) for documents in micro_batches]
    simulation = simulate(lengths, SETUP, SETTINGS, len(lengths), **memory)
    return simulation, {strategy.name: strategy for strategy in simulation.strategies}


def test_figures_of_a_strategy():
    packed = figures_of([[4, 4]])[1]["plain packing"]
    matrices, attention = 2 * (3 * (5 + 6) + 7) * 8, 2 * 3 * 2 * (4 + 4) * (10 + 10)
    seconds = 3 * (1 + 2) * 10  # of both ranks
    assert (packed.step_seconds, packed.tokens_per_second) == (seconds, pytest.approx(8 / seconds))
    assert packed.mfu == pytest.approx(3 * (matrices + attention) / seconds / 2 / 10.0)
    assert (packed.rows_bytes, packed.state_bytes) == (None, None)  # where nobody counts


def test_documents_beyond_all_ranks_are_cut_and_counted_for_every_strategy_and_named():
    simulation, strategies = figures_of([[40], [10, 2]])  # two ranks of 8 tokens hold 16
    assert simulation.tokens == 16 + 10 + 2
    cut = {name: figures.documents_cut for name, figures in strategies.items()}
    assert (
        cut["hf_distca, joint"]
        == cut["hf_distca, chosen"]
        == cut["context parallel, 1 × 2"]
        == 1 / 3
    )
    assert cut["plain packing"] == 2 / 3
    sentence = (
        "1 of 3 documents is longer than the 16 tokens that all ranks hold; the longest has 40. "
        "Here they are cut"
    )
    assert [advice for advice in simulation.advice if advice.startswith(sentence)]
    assert not [advice for advice in figures_of([[16]])[0].advice if "longer than the" in advice]


def test_gpus_of_servers_and_tensor_parallelism():
    setup = replace(SETUP, tensor_parallel=2)
    settings = replace(SETTINGS, kinds=(setup.on_a_gpu(KIND),))
    simulation = simulate([np.array([8, 4])], setup, settings, 1, servers=1)
    strategies = {figures.name: figures for figures in simulation.strategies}
    without_servers = [figures for figures in simulation.strategies if not figures.servers]
    assert {figures.gpus for figures in without_servers} == {2 * 2}
    assert strategies["hf_distca, joint, 1 server"].gpus == (2 + 1) * 2


def test_memory_is_asked_for_the_plan_whose_busiest_rank_exchanges_the_most():
    requests = {}

    def memory(strategy, rows, plan):
        requests[strategy.name] = (
            rows,
            plan and [nano.layout.lengths.tolist() for nano in plan.nano_batches],
        )
        return 7, None if strategy.context > 1 else 5

    _, by_name = figures_of([[2, 2], [16], [4, 4, 4, 4]], memory=memory)
    assert {name: requests[name] for name in requests if name.startswith("hf_distca")} == {
        f"hf_distca, {layout}": (8, [[16]]) for layout in ("fixed", "joint", "chosen")
    }
    assert requests["plain packing"] == (8, None)
    counted = {(figures.rows_bytes, figures.state_bytes) for figures in by_name.values()}
    assert counted == {(7, 5), (7, None)}


def test_gains_and_loads():
    simulation, by_name = figures_of([[12, 4], [4, 4, 4, 4]])
    best = by_name[simulation.best_planned]
    for name, gain in (
        ("plain packing", simulation.over_packing),
        (simulation.best_plain, simulation.over_best),
    ):
        assert gain.speed_up == pytest.approx(by_name[name].step_seconds / best.step_seconds)
    alone = [
        figures_of([documents])[0].over_packing.speed_up for documents in ([12, 4], [4, 4, 4, 4])
    ]
    assert [simulation.over_packing.least, simulation.over_packing.most] == pytest.approx(
        sorted(alone)
    )
    assert simulation.speed_up == pytest.approx(simulation.over_best.speed_up)
    assert list(simulation.load) == [
        "plain packing",
        simulation.best_plain,
        simulation.best_planned,
    ]
    assert simulation.load["plain packing"] == (3 * 3 * 36, 3 * 3 * (10 + 10))  # 8 of 12; 4 and 4
    bins = simulation.histogram
    assert sum(length_bin["documents"] for length_bin in bins) == simulation.documents == 6
    assert sum(length_bin["tokens"] for length_bin in bins) == simulation.tokens == 32
    # The best strategy without plans cuts the fewest documents.
    whole, shared = by_name["whole documents balanced"], by_name["context parallel, 1 × 2"]
    assert (whole.documents_cut, shared.documents_cut) == (1 / 6, 0)  # of all documents
    assert whole.step_seconds < shared.step_seconds
    assert simulation.best_plain == shared.name


def strategy(name: str, **figures) -> StrategyFigures:
    nothing = dict.fromkeys((field.name for field in fields(StrategyFigures)), 0)
    return StrategyFigures(**nothing | {"name": name, "document_layout": None} | figures)


WHOLE = strategy("whole", step_seconds=2.0, attention_seconds=1.2)
JOINT = strategy(
    "joint",
    step_seconds=1.0,
    attention_mean_seconds=0.3,
    document_layout="joint",
    exchange_seconds=0.05,
)


PAYS = (
    "{}× the speed of whole, the best other strategy. "
    "Set document_layout='joint', tokens_per_rank=512."
)
DOES_NOT_PAY = (
    "No gain expected: {}× the speed of whole, the best other strategy. Core attention is 30% of a "
    "step. Longer documents beside short ones would gain more."
)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (2.0, PAYS.format("2.00")),
        (1.02, PAYS.format("1.02")),
        (1.01, DOES_NOT_PAY.format("1.01")),
        (0.5, DOES_NOT_PAY.format("0.50")),
    ],
)
def test_advice_by_the_speed_of_the_best_other_strategy(seconds, expected):
    whole = replace(WHOLE, step_seconds=seconds)
    assert list(advice([whole, JOINT], whole, JOINT, 512)) == [expected]


def test_advice_on_waits():
    waits = replace(JOINT, exchange_seconds=0.06)
    _, *on_waits = advice([WHOLE, waits], WHOLE, waits, 512)
    assert on_waits == [
        (
            "Ranks wait 6% of a step for exchanges. A larger tokens_per_rank hides more of them "
            "behind computation."
        ),
        "A larger balance_tolerance moves fewer rows.",
    ]


def test_advice_on_strategies_that_cut_documents():
    cuts = replace(WHOLE, documents_cut=0.1)
    faster = strategy("plain", step_seconds=0.9, documents_cut=0.3)
    _, *on_cuts = advice([faster, cuts, JOINT], cuts, JOINT, 512)
    assert on_cuts == [
        (
            "Every other strategy cuts documents: whole cuts 10.0% of them. "
            "A document that is cut trains on less context."
        ),
        (
            "plain takes 0.900 s a step, but it cuts 30.0% of the documents. The comparison leaves "
            "it out, because a document that is cut trains on less context."
        ),
    ]
    slower = replace(faster, step_seconds=2.1)
    assert len(list(advice([slower, cuts, JOINT], cuts, JOINT, 512))) == 2


SLOW = LinkCost(0.0, 1e-3)


@pytest.mark.parametrize(
    ("link", "tokens"), [(SLOW, 12), (FREE.within, 15)], ids=["slow links", "free links"]
)
def test_micro_batches_of_slow_links_hold_documents_that_fit_into_whole_ranks(link, tokens):
    documents = [np.array([3, 3, 3, 3, 3])]  # two fit on a rank of 8, and 15 tokens on both
    setup = replace(SETUP, profile=replace(PROFILE, exchange=Links(link, link)))
    simulation = simulate(documents, setup, SETTINGS, 1)
    assert simulation.tokens == tokens
    assert (DRAWN_FOR_RANKS in simulation.advice) is (link is SLOW)
    seconds = {strategy.name: strategy.step_seconds for strategy in simulation.strategies}
    stays_whole = seconds["hf_distca, chosen"] == pytest.approx(seconds["whole documents balanced"])
    assert stays_whole is (link is SLOW)
