"""What cannot resume is refused: incomplete checkpoints, and settings that would change the order of documents."""

import json
import shutil
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np

import hf_distca
from hf_distca.trainer.refusals import Resume
from hf_distca.trainer.resuming import DataPlace, DataProgress, agreed_checkpoint, agreed_place, data_order
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
OF_BATCHES = {"per_device_train_batch_size": 3}
OTHERS: list[tuple[str, dict[str, Any], int, dict[str, Any], str]] = [
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
    ("flattened", OF_BATCHES, 3, OF_BATCHES, "ranks * per_device_train_batch_size is 9, but must be 6"),
]
"""What the data are, settings that were saved, ranks that resume, their settings, and the differences."""


def save(order: dict[str, Any], folder: Any) -> None:
    progress = DataProgress()
    progress.begin(DataPlace(order, epoch=1))
    progress.save(folder)


def place(order: dict[str, Any], folder: Any, ranks: int = 2, **changed: Any) -> DataPlace:
    return agreed_place(order, str(folder), arguments(**changed), groups(ranks))


def test_another_order(tmp_path):
    for source, saved, ranks, changed, differences in OTHERS:
        save(order(source, **saved), tmp_path)
        other = order(source, ranks, **changed)
        with refused(Resume.OTHER_ORDER, differences=differences):
            place(other, tmp_path, ranks)
        assert place(other, tmp_path, ranks, ignore_data_skip=True) == DataPlace(other)
        assert place(order(source, **saved), tmp_path).epoch == 1
    # Another kind of data.
    save(order("packed"), tmp_path)
    with refused(Resume.OTHER_ORDER) as error:
        place(order("stream"), tmp_path)
    assert "ranks is 2, but must be None" in str(error.value)
    assert "train_sampling_strategy is None, but must be random with seed 1" in str(error.value)


def test_a_checkpoint_of_an_earlier_version_or_another_trainer(tmp_path):
    with refused(Resume.NO_PLACE, checkpoint=tmp_path, file="data_order.json"):
        place(order("packed"), tmp_path)
    save({name: value for name, value in order("packed").items() if name != "document_layout"}, tmp_path)
    assert place(order("packed"), tmp_path).epoch == 1
    with refused(Resume.OTHER_ORDER, differences="document_layout is whole on 2 ranks, but must be joint or fixed"):
        place(order("packed", **WHOLE), tmp_path)


def plugins(**given: Any) -> Any:
    return SimpleNamespace(state=SimpleNamespace(**given))


def deepspeed(**config: Any) -> Any:
    return plugins(deepspeed_plugin=SimpleNamespace(deepspeed_config=config))


DDP, FSDP = plugins(), plugins(fsdp_plugin=object())
STATE = "trainer_state.json"
OPTIMIZER, SCHEDULE = "the optimizer's state", "the learning rate's schedule"


def resume(folder: Any, accelerator: Any = DDP, resume_from: Any = True, **changed: Any) -> str | None:
    return agreed_checkpoint(resume_from, arguments(folder, **changed), accelerator, groups())


def checkpoint(folder: Any, files: str) -> Any:
    """A checkpoint of some files and folders alone."""
    at = folder / "checkpoint-3"
    shutil.rmtree(at, ignore_errors=True)
    at.mkdir()
    for name in files.split():
        (at / name).write_text(json.dumps({}))
    return at


def test_checkpoints_with_and_without_state(tmp_path):
    with refused(Resume.NO_CHECKPOINT, folder=tmp_path):
        resume(tmp_path)
    for accelerator, files, missing, state in (
        (DDP, "scheduler.pt", "optimizer.pt", OPTIMIZER),
        (DDP, "optimizer.pt", "scheduler.pt", SCHEDULE),
        (FSDP, "optimizer.pt scheduler.pt", "optimizer_0 or optimizer.bin", OPTIMIZER),
        (deepspeed(), "optimizer.pt scheduler.pt", "global_step*", OPTIMIZER),
        (deepspeed(), "global_step3", "scheduler.pt", SCHEDULE),
    ):
        at = checkpoint(tmp_path, f"{STATE} {files}")
        for ignore, load in (
            (False, f"from_pretrained('{at}')"),
            (True, f"PeftModel.from_pretrained(model, '{at}', is_trainable=True)"),
        ):
            with refused(Resume.NO_STATE, checkpoint=at, files=missing, state=state, load=load):
                resume(tmp_path, accelerator, ignore_data_skip=ignore)
            (at / "adapter_config.json").touch()
    for accelerator, files in (
        (DDP, "optimizer.pt scheduler.pt"),
        (FSDP, "optimizer_0 scheduler.pt"),
        (FSDP, "optimizer.bin scheduler.pt"),
        (deepspeed(), "global_step3 scheduler.pt"),
        (deepspeed(scheduler={}), "global_step3"),
    ):
        at = checkpoint(tmp_path, f"{STATE} {files}")
        assert resume(tmp_path, accelerator) == resume(tmp_path, accelerator, str(at)) == str(at)
        assert resume(tmp_path, accelerator, None) is None
    at = checkpoint(tmp_path, "optimizer.pt scheduler.pt")
    with refused(Resume.INCOMPLETE, checkpoint=at, file=STATE):
        resume(tmp_path, ignore_data_skip=True)
