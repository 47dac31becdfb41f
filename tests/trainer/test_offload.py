"""How many layers' checkpoints go to the host, and refusals before training."""

import logging
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_distca import DistCAConfig
from hf_distca.refusal import RefusedError
from hf_distca.trainer import assembly, offload
from hf_distca.trainer.assembly import make_dispatcher
from hf_distca.trainer.memory import CountedMemory
from hf_distca.trainer.offload import RankNeeds, available_host_memory, chosen_layers
from hf_distca.trainer.refusals import Run
from tests.models_and_batches import small_model
from tests.refused import refused

CPU = torch.device("cpu")
GB = 10**9


def needs(host: str, available: int, excess: int = 0, layer: int = GB) -> RankNeeds:
    return RankNeeds(host, available, layer, excess)


@pytest.mark.parametrize(
    ("of_ranks", "asked", "expected"),
    [
        ([needs("a", 100 * GB)], True, 34),
        ([needs("a", 100 * GB)], "auto", 0),
        ([needs("a", 100 * GB, excess=1)], "auto", 1),
        ([needs("a", 100 * GB), needs("a", 100 * GB, excess=2 * GB + 1)], "auto", 3),
        ([needs("a", 100 * GB, excess=50 * GB)], "auto", 34),
        # 0.9 of 20 GB hold 8 layers of two ranks, with a remainder of 67 MB for each.
        (2 * [needs("a", 20 * GB, excess=50 * GB)], "auto", 8),
        ([needs("a", 20 * GB, excess=50 * GB), needs("b", 6 * GB)], "auto", 5),
    ],
)
def test_as_many_layers_as_do_not_fit_and_as_the_host_holds(of_ranks, asked, expected):
    assert chosen_layers(of_ranks, 34, asked) == expected


def test_a_host_with_too_little_memory(caplog):
    of_ranks = 2 * [needs("a", 20 * GB, excess=50 * GB)]
    values = {"layers": 34, "host": "a", "needed": "72.6", "available": "18.0", "ranks": 2}
    with refused(Run.HOST_MEMORY, **values):
        chosen_layers(of_ranks, 34, True)
    chosen_layers(of_ranks, 34, "auto")
    (record,) = caplog.records
    assert record.levelname == "WARNING"


def test_memory_of_a_container(tmp_path):
    files = {
        "memory.max": "max\n",
        "memory.current": "7000\n",
        "memory.stat": "anon 4000\nactive_file 1000\ninactive_file 500\nshmem 0\n",
    }
    outside = available_host_memory(tmp_path)
    assert outside > 10_000
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert available_host_memory(tmp_path) > 10_000
    (tmp_path / "memory.max").write_text("10000\n")
    assert available_host_memory(tmp_path) == 10_000 - (7000 - 1500)


def _refused(checkpointing: bool) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "available_host_memory", lambda: 10**6)
        model = small_model(num_hidden_layers=3)
        config = DistCAConfig(tokens_per_rank=64, offload_activations=True)
        with pytest.raises(RefusedError) as error:
            make_dispatcher(model, config, CPU, checkpointing=checkpointing)
        return str(error.value)


def test_ranks_refuse_together(rank_pools):
    one, other = rank_pools[2].run(partial(_refused, True))
    assert one == other
    with refused(Run.HOST_MEMORY, layers=1, ranks=2, needed="0.1", available="0.0"):
        raise ValueError(one)
    with refused(Run.NO_CHECKPOINTS):
        raise ValueError(_refused(False))


@pytest.mark.parametrize(
    ("asked", "excess", "strategy", "layers"),
    [("auto", 0, "NO", 0), ("auto", 1, "NO", 1), ("auto", 70_000, "NO", 2), (False, 1, "NO", 0)],
)
def test_a_gpu_whose_memory_is_too_small(monkeypatch, caplog, asked, excess, strategy, layers):
    model: Any = small_model(num_hidden_layers=5)
    config: Any = DistCAConfig(tokens_per_rank=256, offload_activations=asked)
    dispatcher = make_dispatcher(model, config, CPU, checkpointing=True)
    # A row of a checkpoint has 32 * 4 bytes of the input, and 4 * (8 * 4 + 4) of core attention: a
    # layer has 69,632 bytes.
    taken = CountedMemory(256, 95 * 10**7 + excess, 10**9, "weights 1.0")
    monkeypatch.setattr(assembly, "log_memory", lambda *_: taken)
    monkeypatch.setattr(assembly, "checkpointing_of", lambda *_: {})
    memory = SimpleNamespace(total_memory=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
    accelerator = SimpleNamespace(parallelism_config=None, distributed_type=strategy)
    with caplog.at_level(logging.INFO, "hf_distca.trainer"):
        assembly._fit_into_memory(model, config, dispatcher, accelerator)
    assert (dispatcher.offload.layers if dispatcher.offload else 0) == layers
    warned = [record for record in caplog.records if "will not fit" in record.message]
    assert bool(warned) is (asked is False)
