"""Steps of 8, 16 and 64 ranks from this one GPU, as benchmarks/one_gpu.py measures them, as long as there is time."""

import gzip
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.setting import Setting
from hf_distca.kernels import get_kernel
from hf_distca.planner.nodes import EXCHANGE_BANDWIDTH, NETWORK_BANDWIDTH

FOLDER = Path(__file__).parents[1]
BATCHES = FOLDER / "data" / "planner_batches.json.gz"
TOKENS = 32768
"""Of each rank in those batches; a setting with fewer tokens makes the documents shorter."""
RANKS_PER_NODE = 8


def check_many_ranks(setting: Setting) -> Findings:
    """What every way takes, over packed documents: all numbers of ranks on the first batch, then as there is time."""
    end = time.monotonic() + setting.seconds_of_ranks
    one_gpu = _one_gpu()
    findings, wide = Findings(), setting.wide
    kernel = get_kernel("auto", setting.device)
    shape = one_gpu.Shape(
        *(wide[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")),
        wide["head_dim"],
    )
    links = one_gpu.Links([NETWORK_BANDWIDTH], min(RANKS_PER_NODE, setting.ranks[0]), EXCHANGE_BANDWIDTH)
    stopwatch = one_gpu.Stopwatch(
        shape,
        setting.device,
        setting.dtype,
        kernel,
        piece=setting.tokens,
        keys=setting.keys_at_once,
        repeats=min(setting.repeats, 3),
    )
    with gzip.open(BATCHES, "rt") as file:
        batches = one_gpu.chosen(json.load(file)["batches"], [TOKENS], 1)
    results: list[dict[str, Any]] = []
    for batch in batches:
        rows = [[max(length * setting.tokens // TOKENS, 2) for length in row] for row in batch["rows"]]
        for ranks in setting.ranks:
            if len(results) >= len(setting.ranks) and time.monotonic() > end:
                return findings
            results += one_gpu.measure(
                [{**batch, "rows": rows, "T": max(map(sum, rows[:ranks]))}],
                [ranks],
                links,
                shape,
                lambda _tokens: stopwatch,
                kernel,
                setting.dtype.itemsize,
                lambda _results: None,
            )
            findings.figures |= {
                "kernel": kernel.name,
                "batches": [f"{result['batch']}, {result['ranks']} ranks" for result in results],
                "as fast as packed": one_gpu.summary(results, links.bandwidths),
                "results": results,
            }
    return findings


def _one_gpu() -> Any:
    """The script as a module: scripts of its folder import what lies beside them."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module("one_gpu")
