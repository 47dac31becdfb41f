"""What a trainer is given and needs no more, because documents are packed by their lengths."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tqdm.auto import tqdm
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    DefaultDataCollator,
    default_data_collator,
)

BY_PLAN: dict[str, tuple[Any, ...]] = {
    "per_device_train_batch_size": (1,),
    "per_device_eval_batch_size": (1,),
    "train_sampling_strategy": ("random", "sequential"),
    "dataloader_drop_last": (False,),
    "dataloader_in_order": (True,),
    "accelerator_config.split_batches": (False,),
    "accelerator_config.dispatch_batches": (None, False),
    "accelerator_config.even_batches": (True,),
    "accelerator_config.use_seedable_sampler": (True,),
}
"""Arguments that only say how documents become batches, and their values that need no word."""
ROW_COLLATORS = (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    DefaultDataCollator,
)
"""Collators of transformers that give each document a row."""


def arguments_by_name(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a bound method by name.

    Raise TypeError for one whose position has no name.
    """
    names = [
        parameter.name
        for parameter in inspect.signature(method).parameters.values()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    if len(args) > len(names):
        raise TypeError(
            f"{method.__qualname__} takes {len(names)} positional arguments, got {len(args)}; pass "
            "the others by name"
        )
    return {**dict(zip(names, args, strict=False)), **kwargs}


def without_row_collator(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trainer's arguments by name, without a collator that gives each document a row.

    A collator that hides tokens is refused later.
    """
    collator = arguments.get("data_collator")
    # A subclass may do anything.
    makes_rows = type(collator) in ROW_COLLATORS or collator is default_data_collator
    if makes_rows and not getattr(collator, "mlm", False):
        return {**arguments, "data_collator": None}
    return dict(arguments)


def print_left_out(args: Any, collator: Any) -> None:
    """Print, in one line, which arguments have no effect on packed documents.

    Args:
        collator: what the trainer was given and does not use; None if it was given none.
    """
    left_out = list(args.left_out)
    for path, plain in BY_PLAN.items():
        value = args
        for name in path.split("."):
            value = getattr(value, name, plain[0])
        if value not in plain:
            left_out.append(f"{path}={value!r}")
    if collator is not None:
        left_out.append(f"data_collator={getattr(collator, '__name__', type(collator).__name__)}")
    if left_out:
        tokens = f"a rank trains on up to tokens_per_rank={args.tokens_per_rank} tokens at a time"
        tqdm.write(f"Documents are packed by length: {tokens}. No effect: {', '.join(left_out)}")
