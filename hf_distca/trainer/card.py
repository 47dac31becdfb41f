"""The model card's data, and a paragraph about the training by hf_distca."""

import re
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from hf_distca.trainer.parallel import sharing_of
from hf_distca.units import counted
from hf_distca.version import __version__

TAG = "hf_distca"
"""Tag of the model card."""
NAMES = {"ddp": "DDP", "fsdp2": "FSDP2", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
"""Strategies, as the card names them."""
NO_NAME = re.compile(r"\b(?:an unknown|the None|the generator) dataset\.")
"""What transformers writes of data without a name."""
BATCH_SIZES = re.compile(r"^- (?:total_)?(?:train|eval)_batch_size: .*\n", re.MULTILINE)
"""Lines of transformers about numbers of examples, which packed documents do not have."""
PARAGRAPH = """
## Training with hf_distca

hf_distca {version} packed the documents without padding
and balanced their core attention over ranks.

- Data: {data}
- Ranks: {ranks}, under {strategy}
- `tokens_per_rank`: {tokens_per_rank:,}, so that a micro-batch has up to {tokens:,} tokens
- `document_layout`: {document_layout}
"""
STEP = "- Optimizer step: {micro_batches}, up to {tokens:,} tokens\n"
"""A further line, where a step has planned micro-batches of packed documents."""


def complete_card(
    path: Path,
    data: str,
    args: Any,
    model: nn.Module,
    accelerator: Accelerator,
    ranks: int,
    *,
    packs: bool,
) -> None:
    """Describe data and training in a model card that a trainer has just written.

    Args:
        data: the training data in a few words.
        packs: whether hf_distca packs documents, so that no batch has a number of examples.
    """
    strategy, _ = sharing_of(accelerator, model)
    micro_batches = args.gradient_accumulation_steps
    tokens = ranks * args.tokens_per_rank
    paragraph = PARAGRAPH.format(
        version=__version__,
        data=data,
        ranks=ranks,
        strategy=NAMES[strategy],
        tokens_per_rank=args.tokens_per_rank,
        tokens=tokens,
        document_layout=args.document_layout,
    )
    text = NO_NAME.sub(f"{data}.", path.read_text(encoding="utf-8"))
    if packs:
        text = BATCH_SIZES.sub("", text)
        paragraph += STEP.format(
            micro_batches=counted(micro_batches, "micro-batch", "micro-batches"),
            tokens=micro_batches * tokens,
        )
    path.write_text(text + paragraph, encoding="utf-8")
