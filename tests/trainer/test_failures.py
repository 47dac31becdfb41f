"""A rank whose partner failed in the middle of a training reports the partner's error."""

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from transformers import TrainerCallback

from hf_distca.dispatch.failures import Failures
from hf_distca.trainer.resuming import disk_errors_named
from tests.trainer.small_trainers import make_trainer


class FullDisk(TrainerCallback):
    """Fails on rank 1 before the first step."""

    def on_step_begin(self, *args, **kwargs) -> None:
        if dist.get_rank() == 1:
            raise OSError("disk full")


def _fail(folder: str) -> tuple[str, str]:
    # The processes of a pool stay, so that no connection closes: rank 0 loses its partner by the timeout of exchanges,
    # and DDP's group, which has a longer one, must not be what it waits for.
    trainer = make_trainer(folder, max_steps=1, save_strategy="no", exchange_timeout=10.0, ddp_broadcast_buffers=False)
    trainer.add_callback(FullDisk())
    try:
        trainer.train()
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", ""


def test_a_rank_that_waits_in_vain_says_what_failed_elsewhere(rank_pools, tmp_path):
    told, own = rank_pools[2].run(_fail, str(tmp_path))
    assert own == ("OSError", "disk full")
    assert told == ("RuntimeError", "rank 1 failed: OSError: disk full")


class LostDocuments(list):
    """Documents that this rank cannot read because another rank is gone."""

    def __getitem__(self, index):
        raise dist.DistBackendError("Connection closed by peer")


@pytest.mark.parametrize("method", ["train", "evaluate"])
def test_training_and_evaluation_tell(tmp_path, method):
    store = dist.HashStore()
    with pytest.raises(ValueError, match="boom"), Failures(store, 1, 2).reported():
        raise ValueError("boom")
    trainer = make_trainer(str(tmp_path), max_steps=1, save_strategy="no")
    trainer.dispatcher.groups.failures = Failures(store, 0, 2, wait_s=0.2)
    trainer.train_dataset = trainer.eval_dataset = LostDocuments([{"input_ids": [1, 2]}])
    with pytest.raises(RuntimeError, match=r"^rank 1 failed: ValueError: boom$"):
        getattr(trainer, method)()


@contextmanager
def small_files(most: int) -> Iterator[None]:
    """While inside, no file of this process can have more bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_said_with_the_file(tmp_path):
    def train():
        make_trainer(str(tmp_path), max_steps=1, save_strategy="steps", save_steps=1).train()

    train()
    checkpoint = tmp_path / "checkpoint-1"
    sizes = {path.name: path.stat().st_size for path in checkpoint.iterdir()}
    for file in ("optimizer.pt", "model.safetensors"):  # the other one is smaller, or comes later
        shutil.rmtree(checkpoint)
        with (
            small_files(sizes[file] - 1),
            pytest.raises(OSError, match=r"File too large; .* is incomplete: remove it") as caught,
        ):
            train()
        assert caught.value.filename == str(checkpoint / file)


def test_an_error_says_of_itself_whether_it_is_the_disks(tmp_path):
    # Rust's writer removes its file when it fails: there is room again by then.
    with pytest.raises(OSError, match="No space left on device"), disk_errors_named(tmp_path):
        raise RuntimeError("I/O error: No space left on device (os error 28)")
    with pytest.raises(RuntimeError, match="boom"), disk_errors_named(tmp_path):
        raise RuntimeError("boom")
