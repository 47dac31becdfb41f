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

    def __init__(self) -> None:
        self.most = 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Count."""
        self.most = max(self.most, len(multiprocessing.active_children()))


def _held() -> tuple[int, int, int]:
    """Groups, threads and child processes of this process."""
    gc.collect()
    threads = len(os.listdir("/proc/self/task"))
    return len(dist.distributed_c10d._world.pg_map), threads, len(multiprocessing.active_children())


def _trainers_one_after_another(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {"read by": [], "held": [], "losses": []}
    model = small_model()
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
        found["read by"].append((readers.most, len(multiprocessing.active_children())))
        found["open"] = _held()
        found["losses"] += [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        groups, _ = trainer.dispatcher.groups, trainer.close()
        trainer.close()
        found["held"].append(_held())
    with pytest.raises(RuntimeError, match=r"groups of this dispatcher are closed; make a new trainer or dispatcher"):
        trainer.evaluate()
    with pytest.raises(RuntimeError, match="closed"):
        groups.any_of([True])
    with torch.no_grad():
        found["logits"] = tuple(model(input_ids=torch.tensor([[3, 4, 5]])).logits.shape)
    return found


def test_nothing_is_left_of_a_closed_trainer(rank_pools, tmp_path):
    for found in rank_pools[2].run(_trainers_one_after_another, str(tmp_path)):
        assert found["read by"] == [(1, 0), (0, 0), (0, 0)]
        assert found["held"][0] == found["held"][1] == found["held"][2]
        groups, threads, processes = found["held"][0]
        assert (groups, processes) == (1, 0)
        assert found["open"][0] == 3
        assert found["open"][1] > threads
        # Each trained on from where the one before had come to.
        assert found["losses"][0] > found["losses"][1] > found["losses"][2]
        assert found["logits"] == (1, 3, 64)
