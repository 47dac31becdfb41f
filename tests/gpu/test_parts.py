"""The parts of `make gpu` on the CPU with small numbers, and with `pytest -m gpu` as they are on a GPU."""

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu import exchange, steps
from benchmarks.gpu.__main__ import SECONDS, START_S, command_of, parts_of
from benchmarks.gpu.devices import cuda_devices, why_none
from benchmarks.gpu.runner import Part, run_part
from benchmarks.gpu.setting import Setting
from hf_distca.measure import device as measured

SMALL = Setting(
    device=torch.device("cpu"),
    dtype=torch.float32,
    exact=torch.float64,
    task_rows=24,
    head_dims=(16,),
    head_dim=8,
    lengths=(60, 13, 1, 40, 2, 7, 30),
    steps=3,
    attention_rows=128,
    repeats=2,
    wide={
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
    },
    tokens=192,
    plans=5,
    stock_steps=2,
)
COMMAND_S, SET_UP_S = 600, 60
"""A command on a machine that is lent may take so long, and setting it up."""
OPTIONAL = ("flash_attn", "flash_attn_3", "flash_attn_4")
"""Kernels whose packages are not there unless they are brought along."""


def by_name(part: Part) -> str:
    return part.name


@pytest.mark.parametrize(
    "part", [part for part in parts_of(SMALL) if part.name not in ("two ranks", "exchange")], ids=by_name
)
def test_on_the_cpu(part, monkeypatch):
    monkeypatch.setattr(measured, "QUERIES", {"cpu": (16, 64, 256)})
    monkeypatch.setattr(measured, "REPEATS", 1)
    findings = part.check(SMALL)
    assert (findings.wrong, findings.skipped) == ([], "")
    assert findings.figures


def test_two_ranks_on_the_cpu(rank_pools):
    findings = steps.check_two_ranks(SMALL, lambda ranks, *call: rank_pools[ranks].run(*call))
    assert findings.wrong == []
    assert findings.figures["bytes_moved"].keys() == steps.ON_TWO_RANKS.keys()


def alone(_ranks, function, *args):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return [function(*args)]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_exchanges_on_the_cpu(rank_pools, ranks):
    run = alone if ranks == 1 else lambda ranks, *call: rank_pools[ranks].run(*call)
    findings = exchange.check_exchange(SMALL, ranks, run)
    assert findings.wrong == []
    assert findings.figures["link"] == ("none: a rank with itself" if ranks == 1 else "between GPUs")
    assert all(findings.figures[f"{blocks} blocks"]["exchange_ms"] > 0 for blocks in exchange.BLOCKS)


def test_all_parts_fit_into_two_commands():
    assert SET_UP_S + SECONDS <= COMMAND_S - 30  # at the end parts are ended and results written
    commands, left = 0, 0.0
    for part in parts_of(Setting()):
        if not part.name.endswith(OPTIONAL):
            commands, left = (commands, left) if part.limit_s <= left else (commands + 1, SECONDS - START_S)
            left -= part.limit_s
    assert commands <= 2


@pytest.mark.gpu
@pytest.mark.skipif(not cuda_devices(), reason=why_none())
@pytest.mark.parametrize("part", parts_of(Setting(), cuda_devices()), ids=by_name)
def test_on_the_gpu(part, tmp_path):
    result = run_part(part, command_of, tmp_path)
    if result["skipped"]:
        pytest.skip(result["skipped"])
    assert result["wrong"] == [], result["printed"]
