"""Resuming: each document that is left comes once, in the step that it would have been in, or an
error says why.
"""

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
import torch.distributed as dist
from torch.nn.modules.module import _IncompatibleKeys
from transformers import TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from hf_distca.checks.run_rules import Resume
from tests.logged import Messages
from tests.models_and_batches import small_model
from tests.refused import pattern
from tests.trainer.comparison import STRATEGIES
from tests.trainer.small_trainers import LENGTHS, make_trainer, parameters_hash

FIRST = 3
ALL = Counter(range(FIRST, FIRST + sum(LENGTHS)))
"""The tokens of one pass: each comes once, so that it tells which row of which document it is."""
PACKED = {"tokens_per_rank": 96, "num_train_epochs": 3, "gradient_accumulation_steps": 3}
STREAM = {"tokens_per_rank": 160, "max_steps": 7, "gradient_accumulation_steps": 3}
FLATTENED = {"per_device_train_batch_size": 3, "num_train_epochs": 3}
# No document is cut: the longest has 150 tokens.
WHOLE = {"tokens_per_rank": 160, "num_train_epochs": 2, "document_layout": "whole"}
WORKER = {"dataloader_num_workers": 1}
LASTING = {**WORKER, "dataloader_persistent_workers": True}
RUNS: dict[str, tuple[str, dict[str, Any], Sequence[int]]] = {
    "packed": ("packed", PACKED, (0, 3, 4, 7, 8, 11, 12)),
    "sharded": (
        "packed",
        {**PACKED, "save_steps": 3, "strategy": "fsdp2"},
        (0, 3, 4, 7, 8, 11, 12),
    ),
    "whole": ("packed", WHOLE, range(5)),
    "flattened": ("flattened", FLATTENED, range(7)),
    # Ranks differ in how many micro-batches they have; together they have 1 or 2 steps in a pass.
    "stream": ("stream", STREAM, range(0, 22, 3)),
    # Several steps are in a pass; a process of each rank's own reads them.
    "read ahead": (
        "stream",
        {**STREAM, "max_steps": 8, "gradient_accumulation_steps": 1, **WORKER},
        range(9),
    ),
    # This process lives for all passes.
    "own": (
        "own stream",
        {**STREAM, "max_steps": 6, "gradient_accumulation_steps": 2, **LASTING},
        range(0, 13, 2),
    ),
}
"""What the data is, arguments, and the number of micro-batches after each step."""
OTHERS = {
    "learning_rate": 1e-2,
    "lr_scheduler_type": "linear",
    "save_strategy": "steps",
    "save_steps": 1,
}


class OwnStream(torch.utils.data.IterableDataset):
    """A stream that knows nothing of `datasets`, and shuffles itself in each pass."""

    def __init__(self, documents: Sequence[dict[str, Any]]) -> None:
        self._documents = documents
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in np.random.default_rng(self._epoch).permutation(len(self._documents)):
            yield self._documents[index]


class Terminated(TrainerCallback):
    """Asks for a checkpoint in a step, as SIGTERM does with `enable_jit_checkpoint`."""

    def __init__(self, trainer: Any, step: int, event: str) -> None:
        (callback,) = (
            candidate
            for candidate in trainer.callback_handler.callbacks
            if isinstance(candidate, JITCheckpointCallback)
        )
        self._manager = callback.jit_manager
        self._step = step
        setattr(self, event, self._ask)

    def _ask(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == self._step - 1:
            self._manager.is_checkpoint_requested = True


class Passes(TrainerCallback):
    """Notes the epoch in which each pass begins."""

    def __init__(self) -> None:
        self.begun: list[float] = []

    def on_epoch_begin(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        self.begun.append(state.epoch)


def train(folder: str, source: str, options: dict[str, Any]) -> dict[str, Any]:
    """What this rank was given in each micro-batch, what was logged in each step, and warned."""
    arguments = {
        "gradient_accumulation_steps": 1,
        "strategy": "ddp",
        "resume": None,
        **OTHERS,
        **options,
    }
    strategy = STRATEGIES[arguments.pop("strategy")]
    resume = arguments.pop("resume")
    terminated = arguments.pop("terminated", None)
    model = small_model(vocab_size=FIRST + len(ALL))
    source, own = source.removeprefix("own "), source.startswith("own ")
    trainer = make_trainer(
        folder, source, model=model, environment=strategy.environment, **arguments
    )
    assert strategy.type in str(trainer.accelerator.distributed_type)
    documents = [
        {"input_ids": list(range(stop - length, stop))}
        for stop, length in zip((FIRST + np.cumsum(LENGTHS)).tolist(), LENGTHS, strict=True)
    ]
    trainer.train_dataset = OwnStream(documents) if own else datasets.Dataset.from_list(documents)
    if source == "stream" and not own:  # it is shuffled anew in each pass
        trainer.train_dataset = trainer.train_dataset.to_iterable_dataset().shuffle(
            seed=0, buffer_size=6
        )
    if terminated is not None:
        trainer.add_callback(Terminated(trainer, *terminated))
    passes = Passes()
    trainer.add_callback(passes)
    micro_batches: list[list[int]] = []
    training_step = trainer.training_step

    def recorded(model: Any, inputs: dict[str, Any], *args: Any) -> Any:
        micro_batches.append([token for token in inputs["input_ids"][0].tolist() if token >= FIRST])
        return training_step(model, inputs, *args)

    trainer.training_step = recorded
    messages = Messages("hf_distca.trainer")
    try:
        trainer.train(resume_from_checkpoint=resume)
    finally:
        messages.end()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "micro_batches": micro_batches,
        "losses": [entry["loss"] for entry in logs],
        "learning_rates": [entry["learning_rate"] for entry in logs],
        "warnings": [line for line in messages.lines if line.startswith("WARNING")],
        "epoch": trainer.state.epoch,
        "passes": passes.begun,
        "parameters": parameters_hash(trainer.model),
    }


def together(ranks: list[dict[str, Any]]) -> list[Counter[int]]:
    """The tokens of each micro-batch on all ranks."""
    parts_of_ranks = [rank["micro_batches"] for rank in ranks]
    return [sum(map(Counter, parts), Counter()) for parts in zip(*parts_of_ranks, strict=True)]


@pytest.fixture(scope="module")
def run(rank_pools) -> Callable[..., list[dict[str, Any]]]:
    """Train on two ranks, or another number of them."""
    return lambda folder, source, ranks=2, **options: rank_pools[ranks].run(
        train, str(folder), source, options
    )


@pytest.fixture(scope="module")
def whole_run(run, tmp_path_factory) -> Callable[[str], tuple[list[dict[str, Any]], Path]]:
    """Make a run once; its results, and the folder with a checkpoint after each step."""

    @cache
    def made(name: str) -> tuple[list[dict[str, Any]], Path]:
        folder = tmp_path_factory.mktemp("runs")
        source, arguments, _ = RUNS[name]
        return run(folder, source, **arguments), folder

    return made


@pytest.mark.parametrize(
    ("name", "of_passes"),
    [("packed", (4, 4, 4)), ("whole", (2, 2)), ("flattened", (2, 2, 2)), ("stream", (3, 3, 6))],
)
def test_each_document_comes_once_in_a_pass(whole_run, name, of_passes):
    micro_batches = together(whole_run(name)[0])
    starts = np.cumsum([0, *of_passes])
    passes = [
        micro_batches[start : start + count]
        for start, count in zip(starts, of_passes, strict=False)
    ]
    assert [sum(one, Counter()) for one in passes] == [ALL] * len(of_passes)
    assert name == "whole" or passes[0] != passes[1]  # few documents have few orders


CHANGED = {
    "learning_rate": 5e-3,
    "save_steps": 3,
    "ping_pong": False,
    "balance_block_size": 16,
    "attention_kernel": "reference",
    "max_grad_norm": 0.5,
}
"""What changes neither the order of documents nor the number of ranks."""


@pytest.mark.parametrize(
    ("name", "steps", "ranks", "changed"),
    [
        ("packed", (2,), 2, {}),
        ("packed", (3,), 3, {"tokens_per_rank": 64, "document_layout": "fixed"}),
        ("packed", (5,), 2, {"tokens_per_rank": 500}),
        ("packed", (1,), 2, CHANGED),
        ("sharded", (3,), 3, {"tokens_per_rank": 64}),
        ("whole", (1,), 2, {}),
        ("flattened", (2,), 3, {"per_device_train_batch_size": 2}),
        ("stream", (3, 6), 2, {}),
        ("read ahead", (4,), 2, {}),
        ("own", (2, 4), 2, {}),
    ],
)
def test_what_is_left_comes_once(run, whole_run, tmp_path, name, steps, ranks, changed):
    whole, folder = whole_run(name)
    source, arguments, micro_batches = RUNS[name]
    for step in steps:  # a resumed run is resumed again
        resumed = run(
            tmp_path,
            source,
            ranks,
            resume=f"{folder}/checkpoint-{step}",
            **{**arguments, **changed},
        )
        folder = tmp_path
        assert together(resumed) == together(whole)[micro_batches[step] :]
        # Two ranks saved the checkpoint.
        expected = ["has no rng_state_2.pth"] if ranks == 3 else []
        if changed.get("tokens_per_rank", 0) == 500:
            expected.append("still hold at most 192 tokens")
        for line, text in zip(resumed[0]["warnings"], expected, strict=True):
            assert text in line
        for rank in resumed:
            assert rank["epoch"] == whole[0]["epoch"]
            if changed is not CHANGED:
                assert rank["losses"] == pytest.approx(whole[0]["losses"], rel=1e-5)
                assert rank["learning_rates"] == whole[0]["learning_rates"]
        if not changed:
            for rank, of_whole in zip(resumed, whole, strict=True):
                assert rank["micro_batches"] == of_whole["micro_batches"][micro_batches[step] :]
                assert rank["parameters"] == of_whole["parameters"]
                assert rank["losses"] == of_whole["losses"]


def test_micro_batches_that_were_chosen_for_whole_ranks_stay(run, whole_run, tmp_path):
    whole = together(whole_run("whole")[0])
    # On an H100 an exchange takes longer than so small a model computes.
    chosen = {**WHOLE, "document_layout": "auto", "device_profile": "h100"}
    assert together(run(tmp_path, "packed", **chosen)) == whole
    resumed = run(
        tmp_path,
        "packed",
        resume=f"{tmp_path}/checkpoint-1",
        **{**WHOLE, "document_layout": "fixed"},
    )
    assert together(resumed) == whole[1:]
    # Without the checkpoint the layout that is set draws full micro-batches.
    assert (
        together(run(tmp_path / "full", "packed", **{**WHOLE, "document_layout": "fixed"})) != whole
    )


def test_a_run_that_stopped_within_a_pass(run, whole_run, tmp_path):
    whole, _ = whole_run("packed")
    run(tmp_path, "packed", **PACKED, max_steps=3, save_strategy="epoch", learning_rate=0.0)
    assert together(run(tmp_path, "packed", resume=True, **PACKED)) == together(whole)[7:]


def test_what_was_saved_at_the_end_of_a_pass_begins_the_next(run, whole_run, tmp_path):
    _, folder = whole_run("packed")
    for rank in run(tmp_path, "packed", resume=f"{folder}/checkpoint-2", **PACKED):
        assert rank["passes"] == [
            1,
            2,
        ]  # callbacks and random numbers of the pass before are not repeated


@pytest.mark.parametrize(
    ("terminated", "saved"),
    [((3, "on_step_begin"), 2), ((3, "on_optimizer_step"), 3), ((4, "on_optimizer_step"), 4)],
)
def test_a_run_that_was_terminated(run, whole_run, tmp_path, terminated, saved):
    """transformers saves before it calls the callbacks of others, within a step and at the end of a
    pass.
    """
    whole, _ = whole_run("packed")
    run(
        tmp_path,
        "packed",
        **PACKED,
        save_strategy="no",
        enable_jit_checkpoint=True,
        terminated=terminated,
    )
    resumed = run(tmp_path, "packed", resume=True, **PACKED)
    assert together(resumed) == together(whole)[RUNS["packed"][2][saved] :]


def test_new_passes(run, whole_run, tmp_path):
    whole, folder = whole_run("packed")
    shutil.copytree(folder / "checkpoint-3", tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-3/data_order.json").unlink()
    # A checkpoint without its order: the epoch that step 3 is in, from its start.
    resumed = run(tmp_path, "packed", resume=True, **PACKED, ignore_data_skip=True)
    assert together(resumed) == together(whole)[4:11]
    # Another capacity.
    changed = {
        **PACKED,
        "tokens_per_rank": 160,
        "gradient_accumulation_steps": 1,
        "num_train_epochs": 4,
    }
    checkpoint = f"{folder}/checkpoint-1"
    anew = together(
        run(tmp_path / "anew", "packed", resume=checkpoint, **changed, ignore_data_skip=True)
    )
    per_pass = next(n for n in range(1, len(anew)) if sum(anew[:n], Counter()) == ALL)
    # The step of the checkpoint counts: the last pass ends a step early. Going on later does not
    # skip one more.
    assert len(anew) == 4 * per_pass - 1
    assert (
        together(
            run(tmp_path / "anew", "packed", resume=f"{tmp_path}/anew/checkpoint-3", **changed)
        )
        == anew[2:]
    )


@pytest.mark.parametrize("ignore_data_skip", [False, True])
@pytest.mark.parametrize(
    ("ended", "step"),
    [({"num_train_epochs": 2}, 4), ({"max_steps": 3}, 3), ({"max_steps": 2}, 3)],
    ids=["end of a pass", "inside a pass", "before the checkpoint"],
)
def test_nothing_is_left(run, whole_run, tmp_path, ended, step, ignore_data_skip):
    changed = {**PACKED, **ended, "resume": f"{whole_run('packed')[1]}/checkpoint-{step}"}
    resumed = run(tmp_path, "packed", **changed, ignore_data_skip=ignore_data_skip)
    assert [rank["micro_batches"] for rank in resumed] == [[], []]
    (warning,) = resumed[0]["warnings"]
    assert f"training ends at step {ended.get('max_steps', step)}" in warning


def _error_of_own_folder(folders: list[str]) -> str:
    """The error where the ranks look into different folders."""
    with pytest.raises(ValueError, match=r"^resume_from_checkpoint") as error:
        train(folders[dist.get_rank()], "packed", {"resume": True, **PACKED})
    return str(error.value)


def test_weights_that_are_tied_are_not_missing(tmp_path):
    def make(max_steps: int) -> Any:
        tied = small_model(tie_word_embeddings=True)
        return make_trainer(
            str(tmp_path), model=tied, max_steps=max_steps, save_strategy="steps", save_steps=1
        )

    make(1).train()
    resumed = make(2)
    messages = Messages("transformers.trainer")
    try:
        resumed.train(resume_from_checkpoint=True)
        assert not [line for line in messages.lines if "missing keys" in line]
        resumed._issue_warnings_after_load(
            _IncompatibleKeys(["lm_head.weight", "model.norm.weight"], [])
        )
        assert messages.lines[-1].endswith(
            "missing keys in the checkpoint model loaded: ['model.norm.weight']."
        )
        both = ["lm_head.weight", "model.embed_tokens.weight"]
        resumed._issue_warnings_after_load(_IncompatibleKeys(both, []))
        assert messages.lines[-1].endswith(f"missing keys in the checkpoint model loaded: {both}.")
    finally:
        messages.end()


def test_a_checkpoint_that_one_rank_lacks(rank_pools, whole_run, tmp_path):
    for error in rank_pools[2].run(
        _error_of_own_folder, [str(whole_run("packed")[1]), str(tmp_path)]
    ):
        assert re.match(pattern(Resume.NO_CHECKPOINT, given=True), error)
        assert "checkpoint-6; none)" in error
