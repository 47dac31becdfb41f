"""What keeping core attention through gradient checkpoints saves: one document of 16384 tokens, one process.

A small LLaMA runs forward and backward under gradient checkpointing, with core attention computed again in
the backward and with its result kept, in turns; and one layer's core attention forward runs alone.

Run: python benchmarks/checkpointing.py [--rounds 7] [--tokens 16384]
"""

import argparse
import statistics
import time

import torch
from harness import print_json, table
from transformers import LlamaConfig, LlamaForCausalLM

from hf_distca import Dispatcher, PlanSettings
from hf_distca.kernels import AttentionParams, TaskShapes
from hf_distca.plan import AttentionKind

LAYERS, HEADS, HEAD_DIM = 2, 2, 64


def seconds(function) -> float:
    """Time of one call."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def main() -> None:
    """Measure, print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="steps of each kind")
    parser.add_argument("--tokens", type=int, default=16384, help="length of the document")
    options = parser.parse_args()
    kinds = (AttentionKind(None, HEADS, HEADS, HEAD_DIM, HEAD_DIM),)
    settings = PlanSettings(ranks=1, tokens_per_rank=options.tokens, kinds=kinds)
    dispatchers = {
        name: Dispatcher(settings, torch.device("cpu"), keep_core_attention=name == "kept")
        for name in ("recomputed", "kept")
    }
    (plan,) = dispatchers["kept"].plan_lengths([[options.tokens]])
    config = LlamaConfig(
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=352,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=512,
        max_position_embeddings=options.tokens,
        attn_implementation="distca",
        use_cache=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = torch.randint(0, 512, (1, options.tokens))
    batch = {"input_ids": tokens, "position_ids": torch.arange(options.tokens)[None], "labels": tokens}

    def step(name: str) -> None:
        model(**batch, distca_plan=dispatchers[name].bind(plan)).loss.backward()
        model.zero_grad()

    qkv = [torch.randn(options.tokens, HEADS, HEAD_DIM) for _ in range(3)]
    shapes = TaskShapes.build([options.tokens], [options.tokens], "cpu")
    params = AttentionParams(scale=HEAD_DIM**-0.5)
    ways = {
        "recomputed": lambda: step("recomputed"),
        "kept": lambda: step("kept"),
        "one core attention forward": lambda: dispatchers["kept"].kernel.forward(*qkv, shapes, params),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds + 1):
        for name, way in ways.items():
            times[name].append(seconds(way))
    median = {name: statistics.median(measured[1:]) for name, measured in times.items()}  # the first round warms up
    table(["", "median"], [[name, f"{value:.3f} s"] for name, value in median.items()])
    forward = median["one core attention forward"]
    print_json(
        recomputed_s=median["recomputed"],
        kept_s=median["kept"],
        forward_s=forward,
        saved_fraction=(median["recomputed"] - median["kept"]) / (LAYERS * forward),
        step_ratio=median["kept"] / median["recomputed"],
    )


if __name__ == "__main__":
    main()
