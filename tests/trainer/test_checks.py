"""Data of a training or an evaluation that is refused on every rank before the first step."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import datasets
import pytest
import torch.distributed as dist
from transformers import AutoModelForCausalLM, TrainerCallback

from hf_distca.checks.batch_rules import Batch
from hf_distca.checks.capacity_rules import Capacity
from hf_distca.checks.data_rules import Data
from hf_distca.checks.run_rules import Run
from tests.models_and_batches import small_model
from tests.refused import refused
from tests.survey.tiny import tiny_config
from tests.trainer.small_trainers import make_trainer

GOOD = [{"input_ids": [3, 4, 5], "labels": [3, 4, 5]}] * 4
TOKEN = {"input_ids": [3, 64], "labels": [3, 4]}


class NoStep(TrainerCallback):
    """Fails where a step begins."""

    def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("a step began")


def stored(rows: list[dict[str, Any]]) -> datasets.Dataset:
    return datasets.Dataset.from_list(rows)


def streamed(rows: list[dict[str, Any]]) -> datasets.IterableDataset:
    return datasets.IterableDataset.from_generator(partial(iter, rows))


def trainer_of(
    folder: Any, train: Any, evaluated: Any = None, model: Any = None, **arguments: Any
) -> Any:
    given = {"train_dataset": train, "eval_dataset": evaluated}
    trainer = make_trainer(
        str(folder), model=model, given=given, max_steps=1, save_strategy="no", **arguments
    )
    trainer.add_callback(NoStep())
    return trainer


LONG = {"input_ids": [3] * 161, "labels": [3] * 161}
FAULTS = [
    (Capacity.LONG, LONG, {"longest": 4, "length": 161}),
    (Data.LABELS, {"input_ids": [3, 4], "labels": [3]}, {"labels": 1}),
    (Data.EMPTY_DOCUMENT, {"input_ids": [], "labels": []}, {}),
    (Batch.TOKEN_ID, TOKEN, {"token": 64, "at": " at position 1", "last": 63}),
    (Batch.TARGET_ID, {"input_ids": [3, 4], "labels": [3, 64]}, {"label": 64}),
]


@pytest.mark.parametrize(("entry", "row", "values"), FAULTS)
def test_evaluation_data_is_checked_before_the_first_step(tmp_path, entry, row, values):
    for make in (stored, list):
        own = make([*GOOD, row])
        named = (
            "eval_dataset['own']" if entry is Capacity.LONG else "document 4 of eval_dataset['own']"
        )
        with refused(entry, name=named, **values):
            trainer_of(tmp_path, stored(GOOD), {"good": stored(GOOD), "own": own}).train()
    entry = Capacity.LONG_IN_STREAM if entry is Capacity.LONG else entry
    with refused(entry, name="document 4 of rank 0's share of eval_dataset"):
        trainer_of(tmp_path, stored(GOOD), streamed([*GOOD, row])).train()


def test_an_evaluation_stream_that_ends_for_good_is_not_read(tmp_path):
    class Once:
        def __iter__(self) -> Iterator[Any]:
            raise AssertionError("the stream was read")

    with pytest.raises(AssertionError, match="a step began"):
        trainer_of(tmp_path, stored(GOOD), Once()).train()


def test_data_without_targets(tmp_path):
    idle = [{"input_ids": [3, 4], "labels": [3, -100]}] * 2
    for train, evaluated, name in (
        (idle, None, "train_dataset"),
        (GOOD, stored(idle), "eval_dataset"),
    ):
        with refused(Data.NO_TARGETS, name=name, documents=2):
            trainer_of(tmp_path, stored(train), evaluated).train()


def test_positions_of_a_model(tmp_path):
    config = tiny_config("gpt2")
    config.n_positions = 32
    model = AutoModelForCausalLM.from_config(config, attn_implementation="distca")
    rows = [{"input_ids": [3] * 8}, {"input_ids": [3] * 40}]
    with refused(
        Batch.BEYOND_POSITIONS, name="document 1 of train_dataset", length=40, positions=32
    ):
        trainer_of(tmp_path, stored(rows), model=model).train()
    with refused(
        Batch.BEYOND_POSITIONS, name="document 1 of rank 0's share of train_dataset", length=40
    ):
        make_trainer(
            str(tmp_path),
            model=model,
            given={"train_dataset": streamed(rows)},
            max_steps=1,
            save_strategy="no",
        ).train()
    trainer = trainer_of(tmp_path, stored(rows), model=model, long_documents="split")
    assert next(iter(trainer.get_train_dataloader()))["position_ids"].max() == 31


def _refused_on_ranks(folder: str) -> list[str]:
    messages = []
    # The second rank checks the second half of stored documents; of a stream each rank reads its
    # share.
    for rows in (stored([*GOOD, TOKEN]), streamed([*GOOD, *GOOD, GOOD[0], TOKEN])):
        for given in (
            {"train_dataset": stored(GOOD), "eval_dataset": rows},
            {"train_dataset": rows},
        ):
            trainer = make_trainer(
                folder, model=small_model(), given=given, max_steps=3, save_strategy="no"
            )
            try:
                trainer.train()
                messages.append("nothing was raised")
            except (ValueError, RuntimeError) as error:
                messages.append(str(error))
    trainer = make_trainer(
        folder, "flattened", columns=None, model=small_model(), max_steps=3, save_strategy="no"
    )
    if dist.get_rank() == 1:
        collate = trainer.data_collator
        trainer.data_collator = lambda rows: {
            **(batch := collate(rows)),
            "input_ids": batch["input_ids"] + 64,
        }
    try:
        trainer.train()
        messages.append("nothing was raised")
    except (ValueError, RuntimeError) as error:
        messages.append(str(error))
    return messages


def _trained_without_targets(folder: str) -> list[str]:
    """Outcomes of streams without a target, and with targets on the second rank only."""
    outcomes = []
    single = {"input_ids": [3]}
    pair = {"input_ids": [3, 4]}
    for rows in ([single] * 4, [single, pair] * 2):
        options = {"max_steps": 1, "save_strategy": "no"}
        trainer = make_trainer(
            folder, model=small_model(), given={"train_dataset": streamed(rows)}, **options
        )
        try:
            trainer.train()
            outcomes.append(f"{trainer.state.global_step} steps")
        except ValueError as error:
            outcomes.append(str(error))
    return outcomes


def test_a_first_step_without_targets_on_any_rank_is_refused_on_every_rank(rank_pools, tmp_path):
    refusal = str(Run.NO_TARGETS.error(tokens=4))
    assert rank_pools[2].run(_trained_without_targets, str(tmp_path)) == [[refusal, "1 steps"]] * 2


def test_every_rank_raises(rank_pools, tmp_path, subtests):
    names = [
        "document 4 of eval_dataset",
        "document 4 of train_dataset",
        "document 4 of rank 1's share of eval_dataset",
        "document 4 of rank 1's share of train_dataset",
        "a batch of rank 1",
    ]
    for rank, messages in enumerate(rank_pools[2].run(_refused_on_ranks, str(tmp_path))):
        for message, name in zip(messages, names, strict=True):
            with subtests.test(name, rank=rank):
                assert f"{name} has the token id" in message
                assert "the model's embedding has the ids 0 to 63" in message
