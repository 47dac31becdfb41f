"""What cannot resume is refused: incomplete checkpoints, and settings that would change the order of documents."""

import json
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest

import hf_distca
from hf_distca.trainer.refusals import Resume
from hf_distca.trainer.resuming import DataPlace, agreed_checkpoint, agreed_place, data_order
from tests.refused import refused
from tests.trainer.small_trainers import LENGTHS

BASE = {"tokens_per_rank": 96, "gradient_accumulation_steps": 3, "seed": 1}
STREAM = datasets.IterableDataset.from_generator(lambda: iter(()))


def groups(ranks: int = 2) -> Any:
    def raise_together(error: Exception | None, **_: Any) -> None:
        if error is not None:
            raise error

    return SimpleNamespace(
        ranks=ranks, rank=0, raise_together=raise_together, all_gather=lambda value: [value] * ranks
    )


def arguments(folder: Any = "unused", **changed: Any) -> Any:
    return hf_distca.DistCATrainingArguments(
        str(folder), use_cpu=True, report_to=[], **{**BASE, "dataloader_num_workers": 0, **changed}
    )


def order(source: str, ranks: int = 2, skip: int = 0, **changed: Any) -> dict[str, Any]:
    """The order of documents on some ranks: packed without the first ones, of a stream, or of examples."""
    args = arguments(**changed)
    layout = "whole" if args.document_layout == "whole" else "joint"
    return data_order(
        SimpleNamespace(args=args, train_dataset=STREAM if source == "stream" else range(len(LENGTHS))),
        SimpleNamespace(groups=groups(ranks), settings=SimpleNamespace(document_layout=layout)),
        SimpleNamespace(lengths=lambda dataset: (np.array(LENGTHS[skip:]), str(skip) * 64)),
        packs=source != "flattened",
    )


WHOLE = {"document_layout": "whole"}
RANDOM = "train_sampling_strategy is {}, but must be random with seed 1"


@pytest.mark.parametrize(
    ("source", "saved", "ranks", "changed", "differences"),
    [
        (
            *("packed", {}, 3, {"tokens_per_rank": 63}),
            "ranks * tokens_per_rank is 189, but must be at least 192: with 3 ranks, tokens_per_rank=64",
        ),
        ("packed", {}, 2, {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps is 2, but must be 3"),
        ("packed", {}, 2, {"data_seed": 7}, RANDOM.format("random with seed 7")),
        ("packed", {}, 2, {"train_sampling_strategy": "sequential"}, RANDOM.format("sequential")),
        ("packed", {}, 2, {"long_documents": "split"}, "long_documents is split, but must be error"),
        (
            *("packed", {}, 2, {"skip": 1}),
            "train_dataset is 11 documents of 471 tokens, fingerprint 1111111111111111, but must be 12 documents of "
            "621 tokens, fingerprint 0000000000000000",
        ),
        ("packed", WHOLE, 2, {}, "document_layout is joint or fixed, but must be whole on 2 ranks"),
        ("stream", {}, 3, {}, "ranks is 3, but must be 2"),
        ("stream", {}, 2, {"tokens_per_rank": 97}, "tokens_per_rank is 97, but must be 96"),
        ("stream", {}, 2, {"dataloader_num_workers": 1}, "dataloader_num_workers is 1, but must be 0"),
        (
            *("flattened", {"per_device_train_batch_size": 3}, 3, {"per_device_train_batch_size": 3}),
            "ranks * per_device_train_batch_size is 9, but must be 6",
        ),
    ],
)
def test_another_order(tmp_path, source, saved, ranks, changed, differences):
    DataPlace(order(source, **saved), epoch=1).save(tmp_path)
    other = order(source, ranks, **changed)
    with refused(Resume.OTHER_ORDER, differences=differences):
        agreed_place(other, str(tmp_path), arguments(), groups(ranks))
    assert agreed_place(other, str(tmp_path), arguments(ignore_data_skip=True), groups(ranks)) == DataPlace(other)
    assert agreed_place(order(source, **saved), str(tmp_path), arguments(), groups()).epoch == 1


def test_a_checkpoint_of_an_earlier_version(tmp_path):
    stored = {name: value for name, value in order("packed").items() if name != "document_layout"}
    DataPlace(stored, epoch=1).save(tmp_path)
    assert agreed_place(order("packed"), str(tmp_path), arguments(), groups()).epoch == 1
    with refused(Resume.OTHER_ORDER, differences="document_layout is whole on 2 ranks, but must be joint or fixed"):
        agreed_place(order("packed", **WHOLE), str(tmp_path), arguments(), groups())


def test_another_kind_of_data(tmp_path):
    DataPlace(order("packed")).save(tmp_path)
    with refused(Resume.OTHER_ORDER) as error:
        agreed_place(order("stream"), str(tmp_path), arguments(), groups())
    assert "ranks is 2, but must be None" in str(error.value)
    assert "train_sampling_strategy is None, but must be random with seed 1" in str(error.value)


def test_a_checkpoint_without_its_order(tmp_path):
    with refused(Resume.NO_PLACE, checkpoint=tmp_path, file="data_order.json"):
        agreed_place(order("packed"), str(tmp_path), arguments(), groups())


def checkpoint(folder: Any, files: str) -> Any:
    """A checkpoint of some files and folders."""
    at = folder / "checkpoint-3"
    at.mkdir()
    for name in files.split():
        (at / name).write_text(json.dumps({}))
    return at


def plugins(**given: Any) -> Any:
    return SimpleNamespace(state=SimpleNamespace(**given))


def deepspeed(**config: Any) -> Any:
    return plugins(deepspeed_plugin=SimpleNamespace(deepspeed_config=config))


DDP = plugins()
FSDP = plugins(fsdp_plugin=object())
STATE = "trainer_state.json"
OPTIMIZER, SCHEDULE = "the optimizer's state", "the learning rate's schedule"


@pytest.mark.parametrize(
    ("accelerator", "files", "missing", "state"),
    [
        (DDP, "scheduler.pt", "optimizer.pt", OPTIMIZER),
        (DDP, "optimizer.pt", "scheduler.pt", SCHEDULE),
        (FSDP, "optimizer.pt scheduler.pt", "optimizer_0 or optimizer.bin", OPTIMIZER),
        (deepspeed(), "optimizer.pt scheduler.pt", "global_step*", OPTIMIZER),
        (deepspeed(), "global_step3", "scheduler.pt", SCHEDULE),
    ],
    ids=["ddp", "no schedule", "fsdp2", "zero", "zero without schedule"],
)
def test_a_checkpoint_without_state(tmp_path, accelerator, files, missing, state):
    at = checkpoint(tmp_path, f"{STATE} {files}")
    for ignore, load in (
        (False, f"from_pretrained('{at}')"),
        (True, f"PeftModel.from_pretrained(model, '{at}', is_trainable=True)"),
    ):
        with refused(Resume.NO_STATE, checkpoint=at, files=missing, state=state, load=load):
            agreed_checkpoint(True, arguments(tmp_path, ignore_data_skip=ignore), accelerator, groups())
        (at / "adapter_config.json").touch()


@pytest.mark.parametrize(
    ("accelerator", "files"),
    [
        (DDP, "optimizer.pt scheduler.pt"),
        (FSDP, "optimizer_0 scheduler.pt"),
        (FSDP, "optimizer.bin scheduler.pt"),
        (deepspeed(), "global_step3 scheduler.pt"),
        (deepspeed(scheduler={}), "global_step3"),
    ],
)
def test_a_checkpoint_with_its_state(tmp_path, accelerator, files):
    at = checkpoint(tmp_path, f"{STATE} {files}")
    assert agreed_checkpoint(True, arguments(tmp_path), accelerator, groups()) == str(at)
    assert agreed_checkpoint(None, arguments(tmp_path), accelerator, groups()) is None


def test_a_checkpoint_that_was_not_saved_whole(tmp_path):
    at = checkpoint(tmp_path, "optimizer.pt scheduler.pt")
    with refused(Resume.INCOMPLETE, checkpoint=at, file=STATE):
        agreed_checkpoint(True, arguments(tmp_path, ignore_data_skip=True), DDP, groups())


def test_no_checkpoint(tmp_path):
    with refused(Resume.NO_CHECKPOINT, folder=tmp_path):
        agreed_checkpoint(True, arguments(tmp_path), DDP, groups())
