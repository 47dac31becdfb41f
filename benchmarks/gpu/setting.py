"""Sizes and device of all parts; tests run the same parts on the CPU with small numbers."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Replay:
    """Plan whose ranks are replayed: documents of `benchmarks/data/planner_batches.json.gz` on
    ranks of a size.
    """

    name: str
    batch: str
    ranks: int
    tokens_per_rank: int = 32768


REPLAYS = (
    Replay("ProLong, 8 ranks", "prolong-plain-T32K-s0", 8),
    Replay("documents up to 113K, 8 ranks", "wlbllm-up-cp4-T32K-s0", 8),
    Replay("WLB-LLM, 64 ranks", "wlbllm-up-T32K-s0", 64),
)


@dataclass(frozen=True)
class Setting:
    """Sizes of all parts. The defaults suit one GPU with 70 GiB or more.

    Attributes:
        dtype: of core attention.
        exact: dtype of the models that others are compared with.
        task_rows: query rows of the larger tasks that kernels are checked with.
        head_dim: of the small models that are compared step by step.
        lengths: documents of a compared step; they divide into two nano-batches.
        steps: optimizer steps that are compared.
        attention_rows: rows of the document that is computed beside an exchange.
        wide: shape of the model that is trained.
        large_vocabulary: of that model where chunks of the loss are measured.
        tokens: of its micro-batches.
        plans: its steps, in which plans change and memory must stay flat.
        stock_steps: steps of the stock attentions beside it.
        replays: plans that are replayed rank by rank.
        replay_scale: by which lengths of their documents are divided.
        replay_repeats: of each of their kernel calls.
        rollout_model: sizes of the model that computes padded batches: those of Qwen3-0.6B.
        rollouts: sequences of these batches.
        rollout_scale: by which their lengths are divided.
        rollout_repeats: timed steps of each strategy.
        prompt_tokens: of the prompt that eight completions share.
        completion_tokens: the fewest and the most of a completion.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cuda", 0))
    dtype: torch.dtype = torch.bfloat16
    exact: torch.dtype = torch.float32
    task_rows: int = 1000
    head_dims: tuple[int, ...] = (64, 80, 96, 128, 192, 256)
    head_dim: int = 64
    lengths: tuple[int, ...] = (1700, 390, 1, 900, 2, 77, 1200)
    steps: int = 20
    attention_rows: int = 16384
    repeats: int = 10
    wide: dict[str, int] = field(
        default_factory=lambda: {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 4,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 8192,
        }
    )
    large_vocabulary: int = 128256
    tokens: int = 32768
    plans: int = 50
    stock_steps: int = 12
    replays: tuple[Replay, ...] = REPLAYS
    replay_scale: int = 1
    replay_repeats: int = 3
    rollout_model: dict[str, int] = field(
        default_factory=lambda: {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
        }
    )
    rollouts: int = 64
    rollout_scale: int = 1
    rollout_repeats: int = 2
    prompt_tokens: int = 8192
    completion_tokens: tuple[int, int] = (256, 1024)

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype.itemsize == 2)

    def synchronize(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize(self.device)


def setting_of_this_gpu() -> Setting:
    """The setting for the GPU at hand: one with less memory trains on fewer tokens."""
    gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    tokens = next(
        (tokens for least, tokens in ((70, 32768), (36, 16384), (20, 8192)) if gib >= least), 4096
    )
    return replace(Setting(), tokens=tokens)
