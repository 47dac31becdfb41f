"""The memory guide: the most tokens of a rank that fit GPUs of several sizes, by model, ranks and
strategy.

Nothing is trained: a step is run on tensors without numbers and counted (hf_distca.memory). Full
fine-tuning with Adam in bfloat16, float32 copies of the weights, decoder layers checkpointed, one
document over all ranks. `fsdp2, offloaded` has checkpoints in host memory, and MLPs and norms in
chunks of rows; host memory is not limited here. What CUDA and NCCL take themselves is left out of a
GPU's memory.

PYTHONPATH=. python benchmarks/memory_guide.py
"""

from typing import Any, NamedTuple

import torch
from harness import options_parser, print_json, table
from transformers import LlamaConfig, Qwen3Config

from hf_distca.config import DistCAConfig
from hf_distca.memory.counter import MemoryCounter
from hf_distca.models.fake import model_of_config
from hf_distca.models.model_facts import check_model
from hf_distca.models.shape import model_shape
from hf_distca.patches.loss import LEAST_CHUNK_BYTES
from hf_distca.run import RunSpec, Strategy

NAMES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
CONFIGS = {
    "Llama-3.2-1B": (LlamaConfig, (128256, 2048, 8192, 16, 32), {"tie_word_embeddings": True}),
    "Llama-3.1-8B": (LlamaConfig, (128256, 4096, 14336, 32, 32), {}),
    "Qwen3-32B": (Qwen3Config, (151936, 5120, 25600, 64, 64), {"head_dim": 128}),
}
MODELS = {
    name: config(**dict(zip(NAMES, sizes, strict=True)), num_key_value_heads=8, **others)
    for name, (config, sizes, others) in CONFIGS.items()
}
"""The shapes of their config.json."""
RANKS = {"Llama-3.2-1B": (8,), "Llama-3.1-8B": (8, 32), "Qwen3-32B": (32,)}
IN_MEMORY = DistCAConfig(loss_chunk_bytes=LEAST_CHUNK_BYTES)
IN_CHUNKS = DistCAConfig(loss_chunk_bytes=LEAST_CHUNK_BYTES, mlp_chunk_rows=8192)
"""Small chunks of the loss: the most tokens that fit."""


class Case(NamedTuple):
    strategy: Strategy
    offload: bool
    options: DistCAConfig


CASES = {
    "ddp": Case("ddp", False, IN_MEMORY),
    "zero2": Case("zero2", False, IN_MEMORY),
    "fsdp2": Case("fsdp2", False, IN_MEMORY),
    "fsdp2, offloaded": Case("fsdp2", True, IN_CHUNKS),
}
MEMORY = (24, 40, 80, 141)
OWN = 2
"""GB of GPUs, and what CUDA and NCCL take of it."""
GB = 10**9


def main() -> None:
    options_parser(__doc__).parse_args()
    found: list[dict[str, Any]] = []
    for name, config in MODELS.items():
        model = model_of_config(config, torch.float32)
        check_model(model)
        shape = model_shape(model)
        for ranks in RANKS[name]:
            for label, case in CASES.items():
                run = RunSpec.of(
                    case.options,
                    shape,
                    ranks=ranks,
                    planning={"kernel": "torch_varlen"},
                    strategy=case.strategy,
                    mixed=True,
                    checkpointing={},
                    offload=case.offload,
                )
                memory = MemoryCounter(model, by_config=True)
                longest = {size: memory.longest((size - OWN) * GB, run) for size in MEMORY}
                found.append({"model": name, "ranks": ranks, "strategy": label, "longest": longest})
    columns = ("model", "ranks", "strategy", *(f"{size} GB" for size in MEMORY))
    table(
        columns,
        [(*map(str, list(row.values())[:3]), *map(str, row["longest"].values())) for row in found],
    )
    print_json(guide=found)


if __name__ == "__main__":
    main()
