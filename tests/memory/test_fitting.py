"""A training is made to fit: checkpoints go to the host, and MLPs run in chunks; refusals."""

from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from hf_distca import DistCAConfig
from hf_distca.checks.capacity_rules import Capacity
from hf_distca.checks.refusal import RefusedError
from hf_distca.checks.run_rules import Run
from hf_distca.memory import fitting
from hf_distca.memory.fitting import (
    CountedMemory,
    RankNeeds,
    available_host_memory,
    chosen_layers,
    memory_beside_engine,
)
from hf_distca.models.checkpointing import enable_checkpointing, layers_with_checkpoints
from hf_distca.trainer.assembly import make_dispatcher
from tests.logged import Messages
from tests.models_and_batches import small_model
from tests.refused import refused

CPU = torch.device("cpu")
GB = 10**9


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({}, 70),
        ({"vllm_enable_sleep_mode": True}, 100),
        ({"vllm_mode": "server"}, 100),
        ({"use_vllm": False}, 100),
    ],
)
def test_an_engine_beside_the_training_keeps_its_share(settings, left):
    engine = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": False}
    args = SimpleNamespace(vllm_gpu_memory_utilization=0.3, **{**engine, **settings})
    assert memory_beside_engine(args, 100) == left
    assert memory_beside_engine(DistCAConfig(), 100) == 100


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
        # Ranks of a host may read its free memory at different times: the least counts.
        ([needs("a", 20 * GB, excess=50 * GB), needs("a", 6 * GB)], "auto", 2),
    ],
)
def test_as_many_layers_as_do_not_fit_and_as_the_host_holds(of_ranks, asked, expected):
    assert chosen_layers(of_ranks, 34, all_layers=asked is True) == expected


def test_a_host_with_too_little_memory(caplog):
    of_ranks = 2 * [needs("a", 20 * GB, excess=50 * GB)]
    values = {"layers": 34, "host": "a", "needed": "72.6", "available": "18.0", "ranks": 2}
    with refused(Capacity.HOST_MEMORY, **values):
        chosen_layers(of_ranks, 34, all_layers=True)
    chosen_layers(of_ranks, 34, all_layers=False)
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
        patch.setattr(fitting, "available_host_memory", lambda: 10**6)
        model = small_model(num_hidden_layers=3)
        config = DistCAConfig(tokens_per_rank=64, offload_activations=True)
        with pytest.raises(RefusedError) as error:
            make_dispatcher(model, config, CPU, checkpointed=3 * checkpointing)
        return str(error.value)


def test_ranks_refuse_together(rank_pools):
    one, other = rank_pools[2].run(partial(_refused, True))
    assert one == other
    with refused(Capacity.HOST_MEMORY, layers=1, ranks=2, needed="0.1", available="0.0"):
        raise ValueError(one)
    with refused(Run.NO_CHECKPOINTS):
        raise ValueError(_refused(False))


LAYER = 256 * (32 * 4 + 4 * (8 * 4 + 4))
"""Bytes of a layer's checkpoint: of a row 32 numbers of the input, and of each of 4 heads 8 of core
attention and a log-sum-exp."""
CHUNK_ROWS = 128


class Fitted(NamedTuple):
    """What a trainer changed because a GPU's memory is too small."""

    layers: int  # whose checkpoints go to the host
    chunked: list[str]  # modules of a layer
    chunk_rows: int  # of the run
    warnings: list[str]


def fitted(
    excess: int,
    *,
    still: int = 0,
    every: int = 1,
    experts: bool = False,
    liger: bool = False,
    **settings: Any,
) -> Fitted:
    """Fit a model of five layers into a GPU whose memory is too small by some bytes.

    Args:
        still: bytes by which it is too small where MLPs run in chunks.
        every: number of layers of which one has a checkpoint.
    """
    model: Any = small_model(num_hidden_layers=5)
    layer = model.model.layers[0]
    if experts:
        for each in model.model.layers:
            each.mlp = torch.nn.Identity()
    config: Any = DistCAConfig(**{"tokens_per_rank": 256, **settings})
    config.use_liger_kernel, config.liger_kernel_config = liger, None
    dispatcher = make_dispatcher(model, config, CPU, checkpointing={"every_n_layers": every})

    def count(*_: Any) -> CountedMemory:
        missing = still if "chunk_rows" in vars(layer.mlp) else excess
        return CountedMemory(256, 95 * 10**7 + missing, 10**9, "weights 1.0")

    messages = Messages("hf_distca.memory.fitting")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "CHUNK_ROWS", CHUNK_ROWS)
        patch.setattr(fitting, "log_memory", count)
        memory = SimpleNamespace(total_memory=0)
        patch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
        fitting.fit_into_memory(model, config, dispatcher, may_chunk=True)
    messages.end()
    return Fitted(
        dispatcher.offload.layers if dispatcher.offload else 0,
        [name for name, module in layer.named_children() if "chunk_rows" in vars(module)],
        dispatcher.run.mlp_chunk_rows,
        [line for line in messages.lines if line.startswith("WARNING")],
    )


@pytest.mark.parametrize(
    ("asked", "excess", "layers"),
    [
        ("auto", -2 * LAYER, 0),
        ("auto", 0, 0),
        ("auto", 1, 1),
        ("auto", LAYER + 1, 2),
        (False, 1, 0),
    ],
)
def test_a_gpu_whose_memory_is_too_small(asked, excess, layers):
    found = fitted(excess, offload_activations=asked, mlp_chunk_rows=0)
    assert found.layers == layers
    assert found.chunked == []
    assert [" will not fit: " in warning for warning in found.warnings] == [True] * (asked is False)


@pytest.mark.parametrize(
    ("every", "layers", "does_fit"), [(1, 3, True), (2, 1, False), (3, 0, False)]
)
def test_layers_without_checkpoints_move_nothing(every, layers, does_fit):
    """Of five layers 5, 3 or 2 have checkpoints, and the last two checkpoints stay."""
    found = fitted(3 * LAYER, every=every, mlp_chunk_rows=0)
    assert found.layers == layers
    assert [" will not fit: " in warning for warning in found.warnings] == [True] * (not does_fit)


@pytest.mark.parametrize(("every", "layers"), [(1, 5), (2, 2)])
def test_a_model_whose_layers_have_checkpoints_already(every, layers):
    model: Any = small_model(num_hidden_layers=7)
    assert layers_with_checkpoints(model) == 0
    enable_checkpointing(model, every_n_layers=every)
    config = DistCAConfig(tokens_per_rank=64, offload_activations=True)
    dispatcher = make_dispatcher(model, config, CPU)
    assert layers_with_checkpoints(model) == layers + 2
    assert dispatcher.offload is not None
    assert dispatcher.offload.layers == layers


MODULES = ["mlp", "input_layernorm", "post_attention_layernorm"]


def test_mlps_run_in_chunks_where_checkpoints_on_the_host_are_not_enough():
    found = fitted(10**9)
    assert found.layers == 3
    assert found.chunked == MODULES
    assert found.chunk_rows == CHUNK_ROWS
    (warning,) = found.warnings
    assert "so MLPs and norms run over 128 rows at a time" in warning


def test_a_model_that_does_not_fit_in_chunks_either():
    warnings = fitted(10**9, still=10**9).warnings
    assert " will not fit: " in warnings[-1]


@pytest.mark.parametrize(
    ("excess", "changes"),
    [
        (LAYER, {}),  # a checkpoint on the host is enough
        (10**9, {"mlp_chunk_rows": 0}),
        (10**9, {"tokens_per_rank": CHUNK_ROWS}),
        (10**9, {"experts": True}),
        (10**9, {"liger": True}),
    ],
    ids=["fits", "asked", "few rows", "experts", "liger"],
)
def test_mlps_compute_all_rows_at_once(excess, changes):
    found = fitted(excess, **changes)
    assert found.chunked == []
    assert found.chunk_rows == 0


def test_ranks_choose_chunks_together(rank_pools):
    """Only the first of them counts."""
    for found in rank_pools[2].run(partial(fitted, 10**9)):
        assert found.chunked == MODULES
