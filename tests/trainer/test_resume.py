"""Resuming: each document that is left comes once, in the step that it would have been in, or an error says why."""

import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from hf_distca.trainer.refusals import Resume
from tests.logged import Messages
from tests.models_and_batches import small_model
from tests.ranks import RankPool
from tests.refused import pattern
from tests.trainer.comparison import LAUNCHED
from tests.trainer.small_trainers import LENGTHS, make_trainer, parameters_hash

FIRST = 3
ALL = Counter(range(FIRST, FIRST + sum(LENGTHS)))
"""The tokens of one pass: each comes once, so that it tells which row of which document it is."""
ACCUMULATION = 3
PACKED = {"tokens_per_rank": 96, "num_train_epochs": 3}
"""4 micro-batches in a pass, so 2 steps, the second of one micro-batch."""
WHOLE = {"tokens_per_rank": 160, "num_train_epochs": 2, "document_layout": "whole", "gradient_accumulation_steps": 1}
"""No document is cut: the longest has 150 tokens. A pass has 2 steps of a micro-batch each."""
FLATTENED = {"per_device_train_batch_size": 3, "num_train_epochs": 3, "gradient_accumulation_steps": 1}
WORKER = {"dataloader_num_workers": 1}
STREAMS: dict[str, tuple[str, dict[str, Any], int]] = {
    # Ranks differ in how many micro-batches they have; together they have 1 or 2 steps in a pass.
    "stream": ("stream", {"tokens_per_rank": 160, "max_steps": 7, "gradient_accumulation_steps": 3}, 3),
    # Steps of one micro-batch, several of which are in a pass; a process of each rank's own reads them.
    "read ahead": (
        *("stream", {"tokens_per_rank": 160, "max_steps": 8, "gradient_accumulation_steps": 1, **WORKER}),
        4,
    ),
    "own": ("own stream", {"tokens_per_rank": 160, "max_steps": 6, "gradient_accumulation_steps": 2, **WORKER}, 2),
}
"""What a stream is, its arguments, and the step after which it is resumed."""


def train(
    folder: str, source: str, resume: Any, skip: int, strategy: str, arguments: dict[str, Any]
) -> dict[str, Any]:
    """What this rank was given in each micro-batch, what was logged in each step, and warned; or the error."""
    trainer = make_trainer(
        folder,
        source.removeprefix("own "),
        model=small_model(vocab_size=FIRST + len(ALL)),
        environment=LAUNCHED[strategy],
        **{
            "learning_rate": 1e-2,
            "lr_scheduler_type": "linear",
            "save_strategy": "steps",
            "save_steps": 1,
            "gradient_accumulation_steps": ACCUMULATION,
            **arguments,
        },
    )
    trainer.train_dataset = numbered_documents(skip, source)
    micro_batches: list[list[int]] = []
    training_step = trainer.training_step

    def recorded(model: Any, inputs: dict[str, Any], *args: Any) -> Any:
        micro_batches.append([token for token in inputs["input_ids"][0].tolist() if token >= FIRST])
        return training_step(model, inputs, *args)

    trainer.training_step = recorded
    passes = PassesEnded()
    trainer.add_callback(passes)
    messages = Messages("hf_distca.trainer")
    try:
        trainer.train(resume_from_checkpoint=resume)
    except ValueError as error:
        return {"error": str(error)}
    finally:
        messages.end()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "micro_batches": micro_batches,
        "losses": [entry["loss"] for entry in logs],
        "learning_rates": [entry["learning_rate"] for entry in logs],
        "warnings": [line for line in messages.lines if line.startswith("WARNING")],
        "passes": passes.count,
        "parameters": parameters_hash(trainer.model),
        "kind": str(trainer.accelerator.distributed_type),
    }


class PassesEnded(TrainerCallback):
    count = 0

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        self.count += 1


def run(
    pool: RankPool,
    folder: Path,
    source: str,
    resume: Any = None,
    *,
    skip: int = 0,
    strategy: str = "ddp",
    **arguments: Any,
) -> list[dict[str, Any]]:
    """`train` on all ranks of a pool."""
    return pool.run(train, str(folder), source, resume, skip, strategy, arguments)


class OwnStream(torch.utils.data.IterableDataset):
    """A stream that knows nothing of `datasets`, and shuffles itself in each pass."""

    def __init__(self, documents: Sequence[dict[str, Any]]) -> None:
        self._documents, self._epoch = documents, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in np.random.default_rng(self._epoch).permutation(len(self._documents)):
            yield self._documents[index]


def numbered_documents(skip: int, source: str) -> Any:
    """Documents of consecutive tokens; a stream is shuffled anew in each pass."""
    documents, start = [], FIRST
    for length in LENGTHS:
        documents.append({"input_ids": list(range(start, start + length))})
        start += length
    if source == "own stream":
        return OwnStream(documents)
    dataset = datasets.Dataset.from_list(documents[skip:])
    return dataset.to_iterable_dataset().shuffle(seed=0, buffer_size=6) if source == "stream" else dataset


def together(ranks: list[dict[str, Any]]) -> list[Counter[int]]:
    """The tokens of each micro-batch on all ranks."""
    return [sum(map(Counter, parts), Counter()) for parts in zip(*(r["micro_batches"] for r in ranks), strict=True)]


def assert_went_on(resumed: list[dict[str, Any]], whole: list[dict[str, Any]], micro_batches: int) -> None:
    """A resumed run is the rest of the whole run, without its first `micro_batches`."""
    assert together(resumed) == together(whole)[micro_batches:]
    for rank in resumed:
        assert rank["losses"] == pytest.approx(whole[0]["losses"], rel=1e-5)
        assert rank["learning_rates"] == whole[0]["learning_rates"]


@pytest.fixture(scope="module")
def runs(rank_pools, tmp_path_factory) -> Callable[..., tuple[list[dict[str, Any]], Path]]:
    """Make a run of 2 ranks once; its results, and the folder with a checkpoint after each step."""

    @cache
    def made(name: str) -> tuple[list[dict[str, Any]], Path]:
        folder = tmp_path_factory.mktemp("runs")
        source, arguments = {
            "packed": ("packed", PACKED),
            "sharded": ("packed", {**PACKED, "save_steps": 3, "strategy": "fsdp2"}),
            "whole": ("packed", WHOLE),
            "flattened": ("flattened", FLATTENED),
            **{name: stream[:2] for name, stream in STREAMS.items()},
        }[name]
        return run(rank_pools[2], folder, source, **arguments), folder

    return made


@pytest.fixture(scope="module")
def packed(runs):
    return runs("packed")


def test_a_whole_run(packed):
    whole, _ = packed
    micro_batches = together(whole)
    assert len(micro_batches) == 12
    assert [sum(micro_batches[at : at + 4], Counter()) for at in (0, 4, 8)] == [ALL] * 3
    assert whole[0]["learning_rates"] == pytest.approx([0.01 * left / 6 for left in (6, 5, 4, 3, 2, 1)])


# Steps: 0 1 2 3 4 5 6 are after 0 3 4 7 8 11 12 micro-batches.
@pytest.mark.parametrize(
    ("step", "micro_batches", "ranks", "changed"),
    [
        (2, 4, 2, {}),
        (3, 7, 3, {"tokens_per_rank": 64, "document_layout": "fixed"}),
        (5, 11, 2, {"tokens_per_rank": 500}),
    ],
)
def test_what_is_left_comes_once(rank_pools, packed, tmp_path, step, micro_batches, ranks, changed):
    whole, folder = packed
    resumed = run(rank_pools[ranks], tmp_path, "packed", f"{folder}/checkpoint-{step}", **{**PACKED, **changed})
    assert_went_on(resumed, whole, micro_batches)
    assert resumed[0]["passes"] == 3 - micro_batches // 4
    if not changed:
        assert [rank["parameters"] for rank in resumed] == [rank["parameters"] for rank in whole]
        assert resumed[0]["losses"] == whole[0]["losses"]
    larger = ranks * changed.get("tokens_per_rank", 96) > 192
    assert ["still hold at most 192 tokens" in message for message in resumed[0]["warnings"]] == [True] * larger


def test_shards_of_other_ranks(rank_pools, packed, runs, tmp_path):
    (whole, _), (shards, folder) = packed, runs("sharded")
    assert {rank["kind"] for rank in shards} == {"DistributedType.FSDP"}
    assert_went_on(shards, whole, 0)
    changed = {**PACKED, "tokens_per_rank": 64}
    resumed = run(rank_pools[3], tmp_path, "packed", f"{folder}/checkpoint-3", strategy="fsdp2", **changed)
    assert_went_on(resumed, whole, 7)


def test_a_run_that_stopped_within_a_pass(rank_pools, packed, tmp_path):
    whole, _ = packed
    run(rank_pools[2], tmp_path, "packed", **PACKED, max_steps=3, save_strategy="epoch", learning_rate=0.0)
    resumed = run(rank_pools[2], tmp_path, "packed", True, **PACKED)
    assert together(resumed) == together(whole)[7:]


def test_what_does_not_change_the_order_may_change(rank_pools, packed, tmp_path):
    whole, folder = packed
    changed = {
        "learning_rate": 5e-3,
        "num_train_epochs": 2,
        "save_steps": 3,
        "ping_pong": False,
        "balance_block_size": 16,
        "attention_kernel": "reference",
        "keep_core_attention": False,
        "max_grad_norm": 0.5,
    }
    resumed = run(rank_pools[2], tmp_path, "packed", f"{folder}/checkpoint-1", **{**PACKED, **changed})
    assert together(resumed) == together(whole)[3:8]
    assert resumed[0]["warnings"] == []


def _from_own_folder(folders: list[str]) -> dict[str, Any]:
    """Resume where the ranks look into different folders."""
    import torch.distributed as dist

    folder = folders[dist.get_rank()]
    return train(folder, "packed", True, 0, "ddp", PACKED)


def test_a_checkpoint_that_one_rank_lacks(rank_pools, packed, tmp_path):
    _, folder = packed
    for refused in rank_pools[2].run(_from_own_folder, [str(folder), str(tmp_path)]):
        assert re.search(f"^rank 1: ValueError: {pattern(Resume.NO_CHECKPOINT, folder=tmp_path)}", refused["error"])


def test_a_checkpoint_without_its_order(rank_pools, packed, tmp_path):
    whole, folder = packed
    shutil.copytree(folder / "checkpoint-3", tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-3/data_order.json").unlink()
    # A new pass: the epoch that step 3 is in, from its start.
    resumed = run(rank_pools[2], tmp_path, "packed", True, **PACKED, ignore_data_skip=True)
    assert together(resumed) == together(whole)[4:11]


def test_a_new_pass_with_another_capacity(rank_pools, packed, tmp_path):
    _, folder = packed
    changed = {**PACKED, "tokens_per_rank": 160, "gradient_accumulation_steps": 1, "num_train_epochs": 4}
    begun = run(rank_pools[2], tmp_path, "packed", f"{folder}/checkpoint-1", **changed, ignore_data_skip=True)
    whole = together(begun)
    per_pass = next(n for n in range(1, len(whole)) if sum(whole[:n], Counter()) == ALL)
    # The step of the checkpoint counts: the last pass ends a step early. Going on later does not skip one more.
    assert len(whole) == 4 * per_pass - 1
    resumed = run(rank_pools[2], tmp_path, "packed", f"{tmp_path}/checkpoint-3", **changed)
    assert together(resumed) == whole[2:]


def test_nothing_is_left(rank_pools, packed, tmp_path):
    _, folder = packed
    for ignore in (False, True):
        resumed = run(
            rank_pools[2],
            tmp_path,
            "packed",
            f"{folder}/checkpoint-4",
            **{**PACKED, "num_train_epochs": 2, "ignore_data_skip": ignore},
        )
        assert resumed[0]["micro_batches"] == resumed[1]["micro_batches"] == []
        assert ["training ends at step 4" in message for message in resumed[0]["warnings"]] == [True]


def test_a_stream_goes_through_its_passes(runs):
    whole, _ = runs("stream")
    micro_batches = together(whole)
    passes = [micro_batches[:3], micro_batches[3:6], micro_batches[6:12]]
    assert [sum(one, Counter()) for one in passes] == [ALL] * 3
    assert passes[0] != passes[1] != passes[2][:3]


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_goes_on_where_it_was(rank_pools, runs, tmp_path, name):
    whole, folder = runs(name)
    source, arguments, step = STREAMS[name]
    arguments = {**arguments, "save_steps": 2 * step}  # a resumed run is resumed again
    for resumed in (step, 2 * step):
        folder = folder if resumed == step else tmp_path
        if resumed < arguments["max_steps"]:
            went_on = run(rank_pools[2], tmp_path, source, f"{folder}/checkpoint-{resumed}", **arguments)
            for mine, of_whole in zip(went_on, whole, strict=True):
                count = resumed * arguments["gradient_accumulation_steps"]
                assert mine["micro_batches"] == of_whole["micro_batches"][count:]
                for figure in ("losses", "learning_rates", "parameters"):
                    assert mine[figure] == of_whole[figure]


def test_examples_of_a_collator_come_once(rank_pools, runs, tmp_path):
    whole, folder = runs("flattened")
    assert sum(together(whole)[2:4], Counter()) == ALL
    arguments = {**FLATTENED, "per_device_train_batch_size": 2}
    assert_went_on(run(rank_pools[3], tmp_path, "flattened", f"{folder}/checkpoint-2", **arguments), whole, 2)


def test_documents_that_stay_whole(rank_pools, runs, tmp_path):
    whole, folder = runs("whole")
    micro_batches = together(whole)
    assert [sum(micro_batches[:2], Counter()), sum(micro_batches[2:], Counter())] == [ALL] * 2
    resumed = run(rank_pools[2], tmp_path, "packed", f"{folder}/checkpoint-1", **WHOLE)
    assert_went_on(resumed, whole, 1)
    for rank, rest in zip(whole, resumed, strict=True):
        assert rest["micro_batches"] == rank["micro_batches"][1:]
        assert rest["parameters"] == rank["parameters"]
