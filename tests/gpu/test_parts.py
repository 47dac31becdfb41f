"""The parts of `make gpu` on the CPU with small numbers, and with `pytest -m gpu` as they are on a GPU."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu import exchange_blocks, two_ranks
from benchmarks.gpu.__main__ import SECONDS, START_S, command_of
from benchmarks.gpu.devices import cuda_devices, why_none
from benchmarks.gpu.environment import SET_UP_S
from benchmarks.gpu.parts import parts_of
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
    context=256,
    shard_rows=(16, 128),
    keys_at_once=1024,
    least_share=0.0,
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
    ranks=(2, 4),
    seconds_of_ranks=0.0,
    published_heads=(4, 2, 8),
    published_tokens=128,
)


COMMAND_S = 600
"""A command on a machine that is lent may take so long."""
OPTIONAL = ("flash_attn", "flash_attn_3", "flash_attn_4")
"""Kernels whose packages are not there unless they are brought along."""


def by_name(part: Part) -> str:
    return part.name


@pytest.mark.parametrize(
    "part", [part for part in parts_of(SMALL) if part.name not in ("two ranks", "exchange blocks")], ids=by_name
)
def test_on_the_cpu(part, monkeypatch):
    monkeypatch.setattr(measured, "QUERIES", {"cpu": (16, 64, 256)})
    monkeypatch.setattr(measured, "REPEATS", 1)
    findings = part.check(replace(SMALL))
    assert (findings.wrong, findings.skipped) == ([], "")
    assert findings.figures


def test_two_ranks_on_the_cpu(rank_pools):
    findings = two_ranks.check_two_ranks(SMALL, lambda ranks, *call: rank_pools[ranks].run(*call))
    assert findings.wrong == []
    assert findings.figures["bytes_moved"].keys() == two_ranks.WAYS.keys()


def test_all_parts_fit_into_two_commands():
    assert SET_UP_S + SECONDS <= COMMAND_S - 30  # at the end parts are ended and results written
    parts, seconds = parts_of(Setting()), SECONDS - START_S
    assert [part.name for part in parts if part.limit_s > seconds] == []
    commands, left = 0, 0.0
    for part in parts:
        if not part.name.endswith(OPTIONAL):
            commands, left = (commands, left) if part.limit_s <= left else (commands + 1, seconds)
            left -= part.limit_s
    assert commands <= 2


def test_exchanges_of_any_number_of_blocks_on_the_cpu(rank_pools):
    findings = exchange_blocks.check_exchange_blocks(SMALL, lambda ranks, *call: rank_pools[ranks].run(*call))
    assert findings.wrong == []
    assert findings.figures["link"] == "between GPUs"
    assert all(findings.figures[f"{blocks} blocks"]["exchange_ms"] > 0 for blocks in (1, 4, 8, 16, 32))


def test_one_rank_exchanges_with_itself():
    def run(_ranks, function, *args):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            return [function(*args)]
        finally:
            dist.destroy_process_group()

    findings = exchange_blocks.check_exchange_blocks(replace(SMALL, ranks=(1,)), run)
    assert findings.wrong == []
    assert findings.figures["link"] == "none: a rank with itself"


@pytest.mark.gpu
@pytest.mark.skipif(not cuda_devices(), reason=why_none())
@pytest.mark.parametrize("part", parts_of(Setting()), ids=by_name)
def test_on_the_gpu(part, tmp_path):
    result = run_part(part.name, command_of, tmp_path, part.limit_s, all_gpus=part.all_gpus)
    if result["skipped"]:
        pytest.skip(result["skipped"])
    assert result["wrong"] == [], result["printed"]
