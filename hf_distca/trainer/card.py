"""A paragraph of the model card about the training by hf_distca."""

from pathlib import Path

from accelerate import Accelerator
from torch import nn

from hf_distca.config import DistCAConfig
from hf_distca.trainer.memory import sharing_of
from hf_distca.version import __version__

TAG = "hf_distca"
"""Tag of the model card."""
NAMES = {"ddp": "DDP", "fsdp2": "FSDP2", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
"""Strategies, as the card names them."""
PARAGRAPH = """
## Training with hf_distca

hf_distca {version} packed the documents without padding
and balanced their core attention over ranks.

- Ranks: {ranks}, under {strategy}
- `tokens_per_rank`: {tokens_per_rank:,}, so that a micro-batch has up to {tokens:,} tokens
- `document_layout`: {document_layout}
"""


def add_to_card(
    path: Path, config: DistCAConfig, model: nn.Module, accelerator: Accelerator, ranks: int
) -> None:
    """Append the paragraph to a model card that a trainer has just written."""
    strategy, _ = sharing_of(accelerator, model, ranks)
    paragraph = PARAGRAPH.format(
        version=__version__,
        ranks=ranks,
        strategy=NAMES[strategy],
        tokens_per_rank=config.tokens_per_rank,
        tokens=ranks * config.tokens_per_rank,
        document_layout=config.document_layout,
    )
    with path.open("a", encoding="utf-8") as file:
        file.write(paragraph)
