"""What a trainer leaves behind in a process that goes on: no loader's processes and, once closed, no groups."""

import gc
import multiprocessing
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from tests.models_and_batches import small_model
from tests.trainer.small_trainers import LENGTHS, make_trainer


class LoaderProcesses(TrainerCallback):
    """Counts the processes that read data while training goes on."""

    most = 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.most = max(self.most, len(multiprocessing.active_children()))


def _held() -> tuple[int, int, int]:
    """Groups, threads and child processes of this process."""
    gc.collect()
    threads = len(os.listdir("/proc/self/task"))
    return len(dist.distributed_c10d._world.pg_map), threads, len(multiprocessing.active_children())


def _trainers_one_after_another(folder: str) -> None:
    model, closed, losses = small_model(), [], []
    for workers in (1, 0, 0):
        trainer = make_trainer(
            folder,
            model=model,
            lengths=LENGTHS * 2,
            max_steps=1,  # in the middle of a pass, whose loader has more to give
            learning_rate=3e-2,
            save_strategy="no",
            dataloader_num_workers=workers,
        )
        readers = LoaderProcesses()
        trainer.add_callback(readers)
        trainer.train()
        assert (readers.most, len(multiprocessing.active_children())) == (workers, 0)
        before, groups = _held(), trainer.dispatcher.groups
        losses += [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        for _ in range(2):
            trainer.close()
        closed.append(_held())
    # Each trained on from where the one before had come to.
    assert losses[0] > losses[1] > losses[2]
    assert closed == [(1, closed[0][1], 0)] * 3
    assert before[0] == 3
    assert before[1] > closed[0][1]
    with pytest.raises(RuntimeError, match=r"groups of this dispatcher are closed; make a new trainer or dispatcher"):
        trainer.evaluate()
    with pytest.raises(RuntimeError, match="closed"):
        groups.any_of([True])
    with torch.no_grad():
        assert model(input_ids=torch.tensor([[3, 4, 5]])).logits.shape == (1, 3, 64)


def test_nothing_is_left_of_a_closed_trainer(rank_pools, tmp_path):
    rank_pools[2].run(_trainers_one_after_another, str(tmp_path))
