"""Steps and figures of strategies, of documents so short that they can be counted by hand: a pair
takes a second.
"""

from dataclasses import fields, replace

import numpy as np
import pytest

from hf_distca.planner.settings import PlanSettings
from hf_distca.pool.simulation import with_servers
from hf_distca.predict.seconds import KernelCost, LinkCost, Links
from hf_distca.predict.shapes import MixingShape, ModelShape
from hf_distca.predict.step_costs import on_a_gpu
from hf_distca.run import RunSpec
from hf_distca.sim.compare import DRAWN_FOR_RANKS, Compared, StrategyFigures, advice, simulate
from hf_distca.sim.context_parallel import Group
from hf_distca.sim.strategies import (
    all_strategies,
    plain,
    planned,
    step_of_plan,
    whole_documents,
)
from tests.sim.unit_costs import FREE, KIND, PROFILE

MODEL = ModelShape(
    {KIND: 3}, hidden=8, before_attention=5, after_attention=6, head=7, parameters=1000
)
RUN = RunSpec(
    PlanSettings(2, 8, kinds=(KIND,), balance_block_size=1), MODEL, PROFILE, checkpointing={}
)
OF_PLANS = {field.name for field in fields(PlanSettings)}


def changed(**changes):
    """The run with other fields of it, or of its settings of plans."""
    plans = {name: value for name, value in changes.items() if name in OF_PLANS}
    others = {name: value for name, value in changes.items() if name not in OF_PLANS}
    run = replace(RUN, **others)
    kinds = tuple(on_a_gpu(kind, run.tensor_parallel) for kind in run.model.layers)
    return replace(run, plans=replace(run.plans, kinds=kinds, **plans))


PER_PAIR = 3 * (1 + 2)


def test_steps_without_plans():
    step = plain(np.array([4, 2, 2, 2]), RUN)  # 4 and 2, 2 and 2
    assert step.seconds == PER_PAIR * 13
    assert step.attention.mean() == PER_PAIR * (13 + 6) / 2
    assert (step.tokens_most, step.documents_cut) == (6, 0)
    step = plain(np.array([10]), RUN)
    assert (step.seconds, step.documents_cut) == (PER_PAIR * 36, 1)  # 8 rows of ten
    step = whole_documents(np.array([6, 4, 4, 2]), RUN)
    assert (step.seconds, step.tokens_most) == (PER_PAIR * (21 + 3), 8)  # 6 and 2, 4 and 4


def test_context_parallelism_shares_every_document_and_gathers_keys():
    run = changed(
        profile=replace(PROFILE, links=Links(LinkCost(0, 1.0), FREE.between)),
        ranks_per_node=2,
    )
    step = whole_documents(np.array([8]), run, Group(2))
    row_bytes = 4 * (4 + 4)
    assert step.attention.tolist() == [PER_PAIR * 36 / 2] * 2
    assert step.waited.max() == 3 * 3 * 4 * row_bytes
    assert step.bytes_bottleneck == 4 * row_bytes
    of_two_groups = whole_documents(
        np.array([8, 2]), replace(run, plans=replace(run.plans, ranks=4)), Group(2)
    )
    assert of_two_groups.attention.tolist() == [PER_PAIR * pairs / 2 for pairs in (36, 36, 3, 3)]
    # Of 16 rows four parts read 4, 8, 12 and 16 keys.
    keys = replace(PROFILE, forward=KernelCost(0, 0, 1.0, 0), backward=KernelCost(0, 0, 0, 0))
    run = changed(profile=keys, rows_per_rank=16)
    assert plain(np.array([16, 8]), run).seconds == 3 * 16
    assert (
        whole_documents(np.array([16]), run, Group(2)).attention.max() == 3 * (4 + 8 + 12 + 16) / 2
    )
    # On the causal diagonal a row has its task's rows, at most 512.
    diagonal = replace(
        PROFILE, forward=KernelCost(0, 0, 0, 0, 1.0), backward=KernelCost(0, 0, 0, 0)
    )
    run = changed(profile=diagonal, rows_per_rank=600)
    assert plain(np.array([600, 8]), run).seconds == 3 * 600 * 512
    assert whole_documents(np.array([16]), run, Group(2)).attention.max() == 3 * 16 * 4 / 2
    # A whole document is one task. A document shared by two ranks is four, or as many as it has
    # rows.
    of_tasks = replace(
        PROFILE, forward=KernelCost(0, 0, 0, 0, task=1.0), backward=KernelCost(0, 0, 0, 0)
    )
    run = changed(profile=of_tasks, rows_per_rank=32)
    assert plain(np.array([16, 8, 8, 32]), run).attention.tolist() == [3, 3 * 3]
    assert (
        whole_documents(np.array([16, 8, 3]), run, Group(2)).attention.tolist()
        == [3 * (4 + 4 + 3) / 2] * 2
    )


def test_ulysses_divides_heads_and_exchanges_them():
    run = changed(ranks=4, profile=replace(PROFILE, links=Links(LinkCost(0, 1.0), FREE.between)),
        ranks_per_node=2,
    )  # fmt: skip
    heads = Group(2, "heads")
    step = whole_documents(np.array([8, 2]), run, heads)
    assert step.attention.tolist() == [PER_PAIR * pairs / 2 for pairs in (36, 36, 3, 3)]
    # Half of Q and O of two heads; K and V of the one head, which both ranks need.
    row_bytes = 4 * (2 + 2) * (4 + 4) / 2
    assert step.bytes_bottleneck == 4 * row_bytes
    # The output, a quarter of these bytes, is not exchanged again.
    assert step.waited.tolist() == [3 * 2.75 * rows * row_bytes for rows in (4, 4, 1, 1)]
    kept = whole_documents(np.array([8, 2]), replace(run, checkpointing=None), heads)
    assert kept.waited.max() == 3 * 2 * 4 * row_bytes
    # A document stays one task, of half of the heads.
    of_tasks = replace(
        PROFILE, forward=KernelCost(0, 0, 0, 0, task=1.0), backward=KernelCost(0, 0, 0, 0)
    )
    run = changed(profile=of_tasks, rows_per_rank=32)
    assert whole_documents(np.array([16, 8, 3]), run, heads).attention.tolist() == [3 * 3 / 2] * 2


@pytest.mark.parametrize(
    ("group", "within", "between"),
    [
        (Group(2), 60, 0),  # in one node
        (Group(4), 40, 20),  # one of two rows of the other node comes from there
        (Group(4, "heads"), 20, 40),  # from each of the three other ranks
    ],
    ids=["context parallel in a node", "context parallel", "Ulysses"],
)
def test_a_row_of_keys_crosses_to_a_node_once(group, within, between):
    kind = replace(KIND, q_heads=4)

    def seconds(**links):
        profile = replace(PROFILE, links=replace(FREE, **links))
        run = changed(ranks=4, ranks_per_node=2, profile=profile, checkpointing=None)
        return group.exchange_seconds(np.array([60.0]), kind, run).item()

    times = 2 if group.divides == "heads" else 3
    assert seconds(within=LinkCost(0, 1.0)) == pytest.approx(times * within)
    assert seconds(between=LinkCost(0, 1.0)) == pytest.approx(times * between)
    both = seconds(within=LinkCost(0, 1.0), between=LinkCost(0, 1.0))
    assert both == pytest.approx(times * max(within, between))


def test_strategies_that_transformers_run():
    def strategies(**changes):
        run = changed(ranks=8, **changes)
        names = {each.name: each.in_transformers for each in all_strategies(run)}
        return [name for name, runs in names.items() if runs], list(names)

    kind = replace(KIND, q_heads=12, kv_heads=4)
    runs, names = strategies(model=replace(MODEL, layers={kind: 3}))
    # 12 heads cannot be divided over 8 ranks.
    assert runs == ["plain packing", "whole documents balanced", "Ulysses, 4 × 2", "Ulysses, 2 × 4"]
    assert names[4:7] == [f"context parallel, {sizes}" for sizes in ("4 × 2", "2 × 4", "1 × 8")]
    # A head of K and V on two ranks, but not four heads over six ranks; KIND has one for all.
    assert Group(8, "heads").can_share(replace(kind, q_heads=8))
    assert not Group(6, "heads").can_share(kind)
    # Not beside tensor parallelism, and no layers that mix rows in order.
    runs, names = strategies(tensor_parallel=2, model=replace(MODEL, layers={kind: 3}))
    assert runs == ["plain packing"]
    assert "Ulysses, 4 × 2" in names
    mixing = MixingShape(1, 1, 1, 1, 1)
    assert not [
        name for name in strategies(model=replace(MODEL, mixing=mixing))[1] if "Uly" in name
    ]


UNEVEN = np.array([1500, 200, 120, 90, 70, 60])
OF_FOUR = {"ranks": 4, "rows_per_rank": 512, "balance_block_size": 16}


@pytest.mark.parametrize("layout", ["auto", "fixed"])
def test_planned_attention_on_free_links_takes_the_mean(layout):
    step, (plan,) = planned(UNEVEN, changed(**OF_FOUR, document_layout=layout))
    mean = PER_PAIR * float((UNEVEN * (UNEVEN + 1) / 2).sum()) / 4
    assert step.attention.max() == pytest.approx(mean, rel=0.015)
    assert step.seconds == pytest.approx(step.attention.max(), rel=1e-6)
    assert plan.summary.max_over_mean < 1.011


def test_pods_are_steps_of_their_own_that_end_together():
    lengths = np.array([200, 190, 100, 90, 60, 60])
    run = changed(**OF_FOUR, document_layout="auto", pod_ranks=2)
    run = replace(run, plans=replace(run.plans, costs=run.costs))
    step, plans = planned(lengths, run)
    assert [plan.ranks for plan in plans] == [range(0, 2), range(2, 4)]
    alone = [step_of_plan(plan, replace(run, plans=run.plans.of_pod(plan.ranks))) for plan in plans]
    assert step.seconds == max(pod.seconds for pod in alone)
    assert step.attention.tolist() == [*alone[0].attention, *alone[1].attention]
    assert step.tokens_most == max(int(plan.tokens.max()) for plan in plans)


def test_servers_take_their_share_of_planned_attention():
    run = changed(**OF_FOUR)
    alone, _ = planned(UNEVEN, run)
    helped, _ = with_servers(2, run).step(UNEVEN)
    assert helped.attention.max() == pytest.approx(alone.attention.mean() * 4 / 6, rel=0.05)
    assert helped.seconds < alone.seconds


def test_a_server_is_on_a_node_of_its_own():
    # Ranks with equal documents exchange nothing: all rows go to the server, over its one link.
    slow = replace(FREE, within=LinkCost(0, 1.0), between=LinkCost(0, 1.0))
    seconds = []
    for ranks_per_node in (1, 2):
        run = changed(profile=replace(PROFILE, exchange=slow), ranks_per_node=ranks_per_node)
        step, (plan,) = with_servers(1, run).step(np.array([8, 8]))
        assert plan.summary.exchange.bytes_total > 0
        seconds.append(step.seconds)
    assert seconds[0] == seconds[1]


@pytest.mark.parametrize(("ranks_per_node", "place"), [(2, "within"), (1, "between")])
def test_planned_steps_take_the_exchange_and_no_collectives(ranks_per_node, place):
    slow = replace(FREE, **{place: LinkCost(1e4, np.inf)})  # nothing hides it

    def seconds(**profile):
        run = changed(profile=replace(PROFILE, **profile), ranks_per_node=ranks_per_node)
        return planned(np.array([16]), run)[0].seconds

    assert seconds(links=slow) == seconds()
    assert seconds(exchange=slow) > seconds()


def figures_of(micro_batches, **memory):
    lengths = [np.array(documents) for documents in micro_batches]
    simulation = simulate(lengths, RUN, len(lengths), **memory)
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
        cut["hf_distca, fixed"]
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
    run = changed(tensor_parallel=2)
    simulation = simulate([np.array([8, 4])], run, 1, [with_servers(1, run)])
    strategies = {figures.name: figures for figures in simulation.strategies}
    served = strategies.pop("hf_distca, 1 server")
    assert {figures.gpus for figures in strategies.values()} == {2 * 2}
    assert simulation.best_in_transformers == "plain packing"  # nothing else, beside such GPUs
    assert served.gpus == (2 + 1) * 2


def test_memory_is_asked_for_the_plan_whose_busiest_rank_exchanges_the_most():
    requests = {}

    def memory(strategy, rows, plan, patches):
        assert patches == 0
        requests[strategy.name] = (
            rows,
            plan and [nano.layout.lengths.tolist() for nano in plan.nano_batches],
        )
        return 7, None if strategy.group.ranks > 1 else 5

    _, by_name = figures_of([[2, 2], [16], [4, 4, 4, 4]], memory=memory)
    assert {name: requests[name] for name in requests if name.startswith("hf_distca")} == {
        f"hf_distca, {layout}": (8, [[16]]) for layout in ("fixed", "chosen")
    }
    assert requests["plain packing"] == (8, None)
    counted = {(figures.rows_bytes, figures.state_bytes) for figures in by_name.values()}
    assert counted == {(7, 5), (7, None)}


def test_gains_and_loads():
    simulation, by_name = figures_of([[12, 4], [4, 4, 4, 4]])
    best = by_name[simulation.best_planned]
    for name, gain in (
        ("plain packing", simulation.over_packing),
        (simulation.best_in_transformers, simulation.over_transformers),
        (simulation.best_plain, simulation.over_best),
    ):
        assert gain.speed_up == pytest.approx(by_name[name].step_seconds / best.step_seconds)
    alone = [
        figures_of([documents])[0].over_packing.speed_up for documents in ([12, 4], [4, 4, 4, 4])
    ]
    assert [simulation.over_packing.least, simulation.over_packing.most] == pytest.approx(
        sorted(alone)
    )
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
    whole, shared = by_name["whole documents balanced"], by_name["Ulysses, 1 × 2"]
    assert (whole.documents_cut, shared.documents_cut) == (1 / 6, 0)  # of all documents
    assert whole.step_seconds < shared.step_seconds
    assert simulation.best_plain == simulation.best_in_transformers == shared.name


def strategy(name: str, **figures) -> StrategyFigures:
    nothing = dict.fromkeys((field.name for field in fields(StrategyFigures)), 0)
    return StrategyFigures(**nothing | {"name": name, "document_layout": None} | figures)


PACKING = strategy("plain packing", step_seconds=1.5, documents_cut=0.3, in_transformers=True)
ULYSSES = strategy("Ulysses", step_seconds=2.2, in_transformers=True)
WHOLE = strategy("whole", step_seconds=2.0, attention_seconds=1.2)
FIXED = strategy(
    "fixed",
    step_seconds=1.0,
    attention_mean_seconds=0.3,
    document_layout="fixed",
    exchange_seconds=0.05,
)
COMPARED = Compared(PACKING, ULYSSES, WHOLE, FIXED)
OVER_PACKING = (
    "{}× the speed of plain packing, TRL's packing=True. It cuts 30.0% of the documents, and a "
    "document that is cut trains on less context."
)
SET = "Set document_layout='fixed', tokens_per_rank=512."


def test_advice_names_the_best_other_strategy_the_best_that_transformers_run_and_packing():
    assert list(advice(COMPARED, 512)) == [
        f"2.00× the speed of whole, the best other strategy. {SET}",
        "2.20× the speed of Ulysses, the best of those that transformers, accelerate or TRL run.",
        OVER_PACKING.format("1.50"),
    ]
    # One strategy may be all of them, or two.
    runs = replace(COMPARED, best=ULYSSES)
    assert list(advice(runs, 512)) == [
        f"2.20× the speed of Ulysses, the best other strategy. {SET}",
        OVER_PACKING.format("1.50"),
    ]
    whole = replace(PACKING, documents_cut=0.0)
    only_packing = replace(COMPARED, packing=whole, in_transformers=whole)
    assert list(advice(only_packing, 512)) == [
        f"2.00× the speed of whole, the best other strategy. {SET}",
        "1.50× the speed of plain packing, TRL's packing=True.",
    ]
    assert list(advice(replace(only_packing, best=whole), 512)) == [
        f"1.50× the speed of plain packing, TRL's packing=True, the best other strategy. {SET}"
    ]


@pytest.mark.parametrize(
    ("packing", "ulysses", "whole", "pays"),
    [
        (1.0, 1.0, 1.01, False),
        (0.5, 0.5, 0.5, False),
        (1.02, 1.0, 1.0, True),
        (1.0, 1.02, 1.0, True),
        (1.0, 1.0, 1.02, True),
    ],
)
def test_no_gain_is_expected_only_if_no_strategy_is_slower(packing, ulysses, whole, pays):
    seconds = (packing, ulysses, whole)
    others = (PACKING, ULYSSES, WHOLE)
    compared = Compared(
        *(replace(other, step_seconds=taken) for other, taken in zip(others, seconds, strict=True)),
        FIXED,
    )
    assert compared.pays is pays
    first, _, over_packing = advice(compared, 512)
    by_best = f"{whole:.2f}× the speed of whole, the best other strategy."
    no_gain = (
        f"No gain expected: {by_best} Core attention is 30% of a step. Longer documents beside "
        "short ones would gain more."
    )
    assert first == (f"{by_best} {SET}" if pays else no_gain)
    assert over_packing == OVER_PACKING.format(f"{packing:.2f}")


def test_advice_on_waits_and_on_cut_documents():
    waits = replace(FIXED, exchange_seconds=0.06)
    *_, on_waits, on_tolerance = advice(replace(COMPARED, planned=waits), 512)
    assert on_waits == (
        "Ranks wait 6% of a step for exchanges. A larger tokens_per_rank hides more of them behind "
        "computation."
    )
    assert on_tolerance == (
        "A larger tolerance moves fewer rows: planning={'balance_tolerance': 0.1}."
    )
    cuts = replace(WHOLE, documents_cut=0.1)
    *_, on_cuts = advice(replace(COMPARED, best=cuts), 512)
    assert on_cuts == "Every other strategy cuts documents: whole cuts 10.0% of them."


SLOW = LinkCost(0.0, 1e-3)


@pytest.mark.parametrize(
    ("link", "tokens"), [(SLOW, 12), (FREE.within, 15)], ids=["slow links", "free links"]
)
def test_micro_batches_of_slow_links_hold_documents_that_fit_into_whole_ranks(link, tokens):
    documents = [np.array([3, 3, 3, 3, 3])]  # two fit on a rank of 8, and 15 tokens on both
    run = changed(profile=replace(PROFILE, exchange=Links(link, link)))
    simulation = simulate(documents, run, 1)
    assert simulation.tokens == tokens
    assert (DRAWN_FOR_RANKS in simulation.advice) is (link is SLOW)
    seconds = {strategy.name: strategy.step_seconds for strategy in simulation.strategies}
    stays_whole = seconds["hf_distca, chosen"] == pytest.approx(seconds["whole documents balanced"])
    assert stays_whole is (link is SLOW)
