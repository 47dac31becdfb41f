"""How large the parts are and where they run; the tests run the same parts on the CPU with small numbers."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Setting:
    """Sizes of all parts. The defaults are those of one GPU with 70 GiB or more.

    Attributes:
        device: where everything runs.
        dtype: that core attention is computed in.
        exact: dtype of the models that others are compared with.
        task_rows: query rows of the larger tasks that kernels are checked with.
        head_dims: head dims that kernels are checked with.
        head_dim: of the small models that are compared step by step.
        lengths: documents of a compared step; they divide into two nano-batches.
        steps: optimizer steps that are compared.
        context: rows of the one document that shards are compared with.
        shard_rows: rows of a shard.
        keys_at_once: the most K/V rows that one call gets.
        least_share: of one document's speed that long shards must reach, see `shards.LONG`.
        repeats: times that what is timed is repeated.
        wide: shape of the model that is trained.
        tokens: tokens of its micro-batches.
        plans: steps of changing plans in which memory must stay flat.
        stock_steps: steps of the stock attentions beside it.
        ranks: numbers of ranks that the one GPU stands for.
        seconds_of_ranks: after which no further batch is begun with them.
        published_heads: query heads, key-value heads and head dim of MagiAttention's setting.
        published_tokens: tokens of each rank in it.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cuda", 0))
    dtype: torch.dtype = torch.bfloat16
    exact: torch.dtype = torch.float32
    task_rows: int = 1000
    head_dims: tuple[int, ...] = (64, 80, 96, 128, 192, 256)
    head_dim: int = 64
    lengths: tuple[int, ...] = (1700, 130, 1, 900, 2, 77, 1200)
    steps: int = 20
    context: int = 32768
    shard_rows: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    keys_at_once: int = 2**20
    least_share: float = 0.6
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
    tokens: int = 32768
    plans: int = 50
    stock_steps: int = 6
    ranks: tuple[int, ...] = (8, 16, 64)
    seconds_of_ranks: float = 60.0
    published_heads: tuple[int, int, int] = (64, 8, 128)
    published_tokens: int = 8192

    def autocast(self) -> AbstractContextManager[Any]:
        """Mixed precision as `bf16=True` has it, where core attention is computed in a half precision."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype.itemsize == 2)

    def synchronize(self) -> None:
        """Wait until the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def setting_of_this_gpu() -> Setting:
    """The setting for the GPU at hand: one with less memory trains on fewer tokens."""
    setting = Setting()
    gib = torch.cuda.get_device_properties(setting.device).total_memory / 2**30
    for least, tokens in ((70, 32768), (36, 16384), (20, 8192)):
        if gib >= least:
            return replace(setting, tokens=tokens, keys_at_once=setting.keys_at_once * tokens // setting.tokens)
    return replace(setting, tokens=4096, context=8192, keys_at_once=2**16)
