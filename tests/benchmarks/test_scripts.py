"""Parts of benchmark scripts on tiny inputs."""

import gzip
import json
from collections import Counter
from importlib import import_module
from itertools import pairwise, product
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_distca.collator.sampler import GlobalMicroBatch, fit_documents
from hf_distca.plan import FEATURES, Branches, PlannedImages
from hf_distca.plan.routes import make_routes
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # as for a script in it
    return import_module


def test_documents_of_the_step_benchmark(script, subtests):
    step_time = script("step_time")
    assert step_time.whole_rows([4, 3, 2, 1], 2) == [[4], [3, 2, 1]]
    for mix, lengths in step_time.MIXES.items():
        with subtests.test(mix):
            assert sum(lengths) == step_time.LENGTHS_FOR
        for ranks, rows_of in product((2, 4), (step_time.whole_rows, step_time.packed_rows)):
            rows = rows_of(lengths, ranks)
            with subtests.test(mix, ranks=ranks, rows_of=rows_of.__name__):
                assert len(rows) == ranks
                assert [] not in rows
                assert sorted(length for row in rows for length in row) == sorted(lengths)


def test_pairs_and_figures_of_peers(script, subtests):
    peers = script("peers")
    examples = [{"input_ids": [5] * length} for length in (4, 2, 1)]
    packed = peers.Counted(len, padded=False)
    assert packed(examples) == 3
    assert packed.pairs == 10 + 3 + 1
    padded = peers.Counted(len, padded=True)
    assert padded(examples) == 3
    assert padded.pairs == 3 * 10
    assert peers.document_lengths(torch.tensor([0, 1, 2, 0, 0, 1])) == (3, 1, 2)
    ranks = [{"mix": {"seconds": 2.0, "loss": 7.0, "pairs": pairs}} for pairs in (30.0, 10.0)]
    assert peers.together(ranks) == {"mix": {"seconds": 2.0, "loss": 7.0, "imbalance": 1.5}}
    assert peers.together([{"mix": {"MiB": 3.0}}, {"mix": {"MiB": 5.0}}]) == {"mix": {"MiB": 5.0}}
    assert peers.largest_difference([2.0, 3.0], [2.0, 4.0]) == 0.25
    for mix, lengths in peers.MIXES.items():
        with subtests.test(mix):
            assert sum(lengths) == peers.TOKENS
            assert {length % 32 for length in lengths} == {0}
            assert {len(lengths) % ranks for ranks in peers.RANKS} == {0}


@pytest.mark.parametrize(
    ("to_all", "columns"),
    [(True, [5, 5]), (False, [5, 3])],
    ids=["to the longest of all", "to the longest of a batch"],
)
def test_padded_batches(script, to_all, columns):
    batches = script("harness.padded").padded_batches(
        [5, 2, 3], 10, torch.device("cpu"), to_all=to_all, at_once=2
    )
    assert [batch.input_ids.shape[1] for batch in batches] == columns
    assert [batch.attention_mask.sum(1).tolist() for batch in batches] == [[5, 2], [3]]


def test_lengths_of_rollouts(script):
    harness = script("harness.padded")
    benchmark = script("padded")
    lengths = harness.rollout_lengths(2000)
    assert min(lengths) >= 2
    assert max(lengths) == harness.LONGEST
    assert 280 < np.median(lengths) < 320
    assert harness.rollout_lengths(2000, scale=4) == [max(length // 4, 2) for length in lengths]
    assert sum(harness.lengths_that_add_up(64, 16384, seed=3)) == 16384
    rows = benchmark.rows_of(benchmark.Case(32, 4))
    tokens = sum(harness.rollout_lengths(32, 4))
    assert (
        rows["packed"]
        == rows["hf_distca"]
        == tokens
        < rows["padded to eight"]
        < rows["padded to all"]
    )


def test_sequences_with_equal_prefixes(script):
    harness = script("harness.prefixes")
    two_groups = harness.groups(2, 1024, 0)
    assert len(two_groups) == 16
    for group in (two_groups[:8], two_groups[8:]):
        prompts = {tuple(example.tokens[: example.given].tolist()) for example in group}
        assert [len(prompt) for prompt in prompts] == [1024]
        assert all(64 <= len(example.tokens) - 1024 <= 256 for example in group)
    pairs = harness.pairs(1, 1024, 0)
    for chosen, rejected in zip(pairs[::2], pairs[1::2], strict=True):
        assert chosen.given == rejected.given
        assert torch.equal(chosen.tokens[: chosen.given], rejected.tokens[: chosen.given])
    sessions = harness.sessions(2, 1024, 0)
    assert [sessions[rank].given for rank in (0, 8)] == [512, 512]
    for turn, following in pairwise(sessions[:8]):
        assert torch.equal(turn.tokens, following.tokens[: following.given])
    assert torch.equal(sessions[0].tokens[:512], sessions[15].tokens[:512])
    batch = harness.batch_of_examples(sessions[:2], torch.device("cpu"))
    assert batch.is_target.sum() == harness.targets_of(sessions[:2])


def test_plans_that_know_of_nodes_beside_flat_ones(script, subtests):
    planner = script("planner")
    # A node has room for two long documents and two short ones. Flat plans divide long ones over
    # ranks of several nodes.
    rows = [[1536], [], [], [512], [1536], [], [], [512]] * 8
    batch = {"id": "alike-s0", "layout": "dp", "T": 512, "rows": rows}
    flat, aware = (
        planner.planned(batch, "auto", 0.01, ranks_per_node, 1) for ranks_per_node in (None, 8)
    )
    assert flat.bytes_between_nodes > 0 == aware.bytes_between_nodes
    assert aware.link_seconds == aware.busiest_within_node / 450e9 < flat.link_seconds
    for name, metrics in (("flat", flat.metrics), ("node-aware", aware.metrics)):
        with subtests.test(name):
            assert metrics.max_over_mean <= 1.01
            assert metrics.tokens_max_over_mean == 1.0


def run(mode: str, rows: list[list[int]], ms: list[float], **changes) -> dict:
    samples = [{"rows": rows, "ms": milliseconds} for milliseconds in ms]
    sizes = {"tp": 1, "dp": 2, "cp": None, "layers": 1, "tokens_per_row": 8}
    return {"mode": mode, **sizes, "pairing": "2i,2i+1", "samples": samples, **changes}


def test_what_is_known_of_a_step_of_the_reference(script, monkeypatch):
    reference = script("reference_steps")

    def described(mode, rows, **changes):
        (step,) = reference.described(reference.Run.of(run(mode, rows, [1.0], **changes)))
        return step.rows, step.pairs, step.moving > 0

    rows = [[8], [4, 4], [2] * 4, [8]]
    assert described("baseline", rows) == (2, 36 + 20, False)  # the first rank's
    assert described("d2", rows)[1] < 36 + 20
    assert described("d2", rows)[2] is True
    assert described("wlbllm", rows)[2] is False
    # Strided: rank 0 has the first and the third row.
    assert described("baseline", rows, pairing="i,i+dp")[1] == 36 + 20
    assert described("baseline", [[8], [1], [8], [1]], pairing="i,i+dp")[1] == 2 * 36
    assert described("baseline", [[8], [8]], cp=2) == (1 / 2, 36 / 2, True)
    # Whole documents go to the group with the least work: 8 alone; 4, 2 and 2 together.
    monkeypatch.setattr(reference, "EVEN_TOKENS", 4)
    assert described("wlbllm", [[8, 4], [2, 2]], cp=1) == (1, 36, False)
    # `dp` counts groups: one group of two ranks has all documents.
    assert described("wlbllm", [[8, 4], [2, 2]], dp=1, cp=2) == (1, (36 + 10 + 3 + 3) / 2, True)
    assert described("wlbllm", [[8, 4], [2, 2]], dp=2, cp=2) == (1 / 2, 36 / 2, True)


def test_steps_of_the_reference_are_predicted_by_its_baseline_alone(script, subtests):
    reference = script("reference_steps")
    content = json.loads(
        gzip.decompress((ROOT / "benchmarks/data/measured_steps.json.gz").read_bytes())
    )
    for name, runs in content.items():
        few = [reference.Run.of({**run, "samples": run["samples"][:20]}) for run in runs]
        figures = reference.figures_of(few)
        with subtests.test(name):
            assert figures["baseline_r2"] > 0.99
            assert figures["balanced_error_mean"] < 0.05
            assert figures["balanced_error_p90"] < 0.10
        if "whole_error_mean" in figures:
            named = name == "dp8-128k-L4"
            with subtests.test(name, documents="whole"):
                assert figures["whole_ranks_a_document_named"] is named
                assert figures["whole_ranks_a_document"] == ([1, 2, 4] if named else [4])
                assert figures["whole_error_mean"] < (0.06 if named else 0.05)
    baseline = [run("baseline", [[length], [1], [1], [1]], [float(length)]) for length in (2, 4, 8)]

    def figures_with_balanced_step(ms: float) -> dict:
        runs = [*baseline, run("d2", [[8], [1], [1], [1]], [ms])]
        return reference.figures_of([reference.Run.of(measured) for measured in runs])

    fast = figures_with_balanced_step(1.0)
    slow = figures_with_balanced_step(5.0)
    assert fast["ms_per_billion_pairs"] == slow["ms_per_billion_pairs"]
    assert np.isclose((1 + fast["balanced_bias"]) * 1.0, (1 + slow["balanced_bias"]) * 5.0)


def test_rows_that_branches_gather_and_merge(script):
    prefix_plans = script("prefix_plans")
    # A root of 4 rows with two branches of 2 rows, on one rank. The branches read the root in one
    # call: 8 rows in place, and the root once more for 4 queries.
    branches = Branches(np.array([-1, 0, 0]), np.array([0, 4, 4]))
    plan = plan_micro_batch([4, 6, 6], PlanSettings(1, 8), branches)
    routes = make_routes(*plan.nano_batches[0].plans.values(), 0)
    assert prefix_plans.gathered_rows(routes) == 8 + 4
    assert prefix_plans.merged_rows(routes) == 4
    assert (
        prefix_plans.shared_over_unshared(
            "pairs", {"pairs, shared, ms": 2, "pairs, unshared, ms": 8}
        )
        == 0.25
    )
    prompts = prefix_plans.Prompts(256, (128, 129), (1, 2)).drawn(2)
    assert {length for lengths in prompts.lengths for length in lengths} == {256 + 128 + 1}
    first, second = prompts.hashes[0][0], prompts.hashes[1][0]  # of one prompt
    assert [one == two for one, two in zip(first, second, strict=True)] == [True] * 3 + [False]


@pytest.mark.parametrize(
    ("kind", "targets"), [("answers", 85 + 14), ("turns", 255 + 44), ("all tokens", 255 + 299)]
)
def test_targets_of_a_rank(script, kind, targets):
    """Two turns, of 256 and 44 tokens."""
    of_script = script("targets")
    documents = of_script.Documents.of(kind, np.array([[256, 300]]))
    spans = fit_documents(documents.lengths, 300, "error", "the longest")
    batch = GlobalMicroBatch(spans, trees=np.zeros(2, np.int64))
    assert of_script.targets_of_ranks(documents, batch, PlanSettings(1, 300)) == [targets]
    two_ranks = of_script.targets_of_ranks(documents, batch, PlanSettings(2, 150))
    assert sum(two_ranks) == targets


def test_encoders_planned_and_in_place(script, monkeypatch):
    benchmark = script("encoder_balance")
    monkeypatch.setattr(benchmark, "TOKENS", 8192)
    documents = benchmark.Documents.drawn(40)
    images = documents.images
    assert images.model.modalities[0].patch == 16
    assert images.model.modalities[0].merge == 2
    linear = 27 * (4 * 1152**2 + 2 * 1152 * 4304)
    assert images.model.encoder.operations == (linear, 2 * 27 * 1152)
    run = benchmark.simulated_run(benchmark.QWEN3_8B, 4, 8192)
    chosen = next(iter(documents.micro_batches(4, 1)))
    found = benchmark.both(documents, chosen, run)
    steps = found.pop("steps")
    assert steps["hf_distca"] <= min(steps.values())
    planned, in_place = found["planned"], found["in place"]
    work = "work, busiest over mean"
    assert 1 <= planned[work] <= in_place[work]
    for name in ("mean, s", "pixels encoded by the mean rank, GB"):
        assert planned[name] == pytest.approx(in_place[name])
    for each in found.values():
        assert (
            each["pixels read by the mean rank, GB"] >= each["pixels encoded by the mean rank, GB"]
        )
    assert benchmark.together([{"x": 1.0}, {"x": 3.0}]) == {"x": {"mean": 2.0, "worst": 3.0}}


def test_an_image_in_place_is_encoded_where_it_begins(script):
    benchmark = script("encoder_balance")
    features = np.zeros(3, FEATURES)
    # Rank 0 has the end of image 0 and the whole image 1, rank 1 the beginning of image 0.
    features["image"] = [0, 1, 0]
    features["start"] = [4, 0, 0]
    features["stop"] = [6, 5, 4]
    features["rank"] = [0, 0, 1]
    planned = PlannedImages(np.array([6, 5]), np.array([0, 1]), features)
    assert benchmark.in_place(planned).encoders.tolist() == [1, 0]


def test_documents_of_tasks_have_their_length_and_one_right_answer(script, subtests):
    tasks = script("tasks")
    for task, length in product(tasks.TASKS, tasks.LENGTHS):
        with subtests.test(task, length=length):
            tokens, targets = tasks.document(task, Random(3), length)
            assert len(tokens) == len(targets) == length
            assert max(tokens) < tasks.VOCABULARY
            asked = [place for place, target in enumerate(targets) if target != tasks.NO_ANSWER]
            assert [tokens[place] for place in asked] == [targets[place] for place in asked]
            begin = tokens.index(tasks.ASK)
            context = tokens[1:begin]
            assert asked[0] > begin
            if task == "count":
                counts = Counter(context).most_common(len(asked) + 1)
                assert [word for word, _ in counts[:-1]] == [tokens[place] for place in asked]
                assert len({times for _, times in counts}) == len(counts)
                continue
            first, of_two = {
                "needle": (tasks.KEY, tasks.NEEDLE),
                "track": (tasks.NAME, tasks.ASSIGNMENT),
            }[task]
            answers_from = tasks.VALUE if task == "needle" else tasks.NAME
            for place in asked:
                given, answer = tokens[place - 1] - first, tokens[place] - answers_from
                assert of_two + given * tasks.KINDS + answer in context
                assert sum((symbol - of_two) // tasks.KINDS == given for symbol in context) == 1


def test_steps_of_tasks_fill_all_ranks_and_begin_with_short_documents(script):
    tasks = script("tasks")
    steps = tasks.steps_of(20)
    lengths = [[len(document.input_ids) for document in step] for step in steps]
    assert {sum(step) for step in lengths} == {2 * tasks.TOKENS_PER_RANK}
    assert lengths[0] == [32] * 32
    assert max(max(step) for step in lengths) == 2 * tasks.TOKENS_PER_RANK


class RightUpTo:
    """Logits [B, L, 4] of a model that predicts the next token 2, which is right up to a place."""

    def __init__(self, place: int) -> None:
        self.place = place

    def __call__(self, input_ids: torch.Tensor) -> SimpleNamespace:
        logits = torch.zeros(*input_ids.shape, 4)
        logits[:, : self.place, 2] = 1
        return SimpleNamespace(logits=logits)


def test_right_answers_and_their_differences(script):
    tasks = script("tasks")
    of = script("harness.both_ways").Document
    documents = [of([3, 2, 3, 2], [-100, 2, -100, 2]), of([3, 2, 3, 3], [-100, 2, -100, 3])]
    assert tasks.right_answers(RightUpTo(4), documents) == [1.0, 0.5]
    assert tasks.right_answers(RightUpTo(1), documents) == [0.5, 0.5]
    of_seeds = {"stock": [[1.0, 0.0], [1.0, 1.0]], "planned": [[1.0, 0.5], [1.0, 1.0]]}
    row = tasks.row_of("needle", 32, of_seeds)
    assert (row["stock"], row["planned"], row["difference"]) == (0.75, 0.875, 0.125)
    assert row["standard error of the difference"] == pytest.approx(0.125)


def test_distances_of_curves_and_steps_alike(script):
    curves = script("harness.curves")
    preferences = script("preference_curves")
    stock, planned = [np.array([0.0, 1.0]), np.array([2.0, 1.0])], [np.array([0.0, 2.0])] * 2
    of_ways, of_seeds = curves.distances({"stock": stock, "planned": planned})
    assert of_ways == [0.5, 1.5]
    assert of_seeds == [1.0, 0.0]
    assert [preferences.steps_alike(one, planned[0]) for one in stock] == [1, 0]
    assert preferences.steps_alike(stock[0], stock[0] + 1e-4) == 2
    assert preferences.share_of_wanted(["w0 w7 w8 w1", ""]) == [0.75, 0.0]


def test_a_rank_without_documents_has_a_row_without_a_target(script):
    both_ways = script("harness.both_ways")
    parts = both_ways.on_ranks([both_ways.Document([5, 6, 7], [5, 6, 7])])
    assert sorted(len(part) for part in parts) == [0, 1]
    rows = [both_ways.RowOfDocuments()([{"documents": part}]) for part in parts]
    targets = sorted((row["labels"] != -100).sum().item() for row in rows)
    assert targets == [0, 2]
