"""Trainers of small models on few documents, for tests."""

import hashlib
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import accelerate
import datasets
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import DataCollatorWithFlattening

import hf_distca
from tests.models_and_batches import exchanging, random_documents, small_model, with_planning

LENGTHS = [150, 3, 17, 60, 1, 33, 90, 45, 7, 120, 64, 31]


def make_trainer(
    folder: str,
    source: str = "packed",
    lengths: Sequence[int] = LENGTHS,
    model: Any = None,
    columns: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    given: dict[str, Any] | None = None,
    **arguments: Any,
) -> Any:
    """A trainer on CPU, on as many ranks as there are.

    Args:
        source: what the data is: "packed", a data set with a length; "list"; "transform", a data
            set that makes its examples when it is asked for them; "stream"; or "flattened", with a
            padding-free collator.
        columns: of every example, besides input_ids.
        environment: variables that `accelerate launch` sets for a strategy; DDP by default.
        given: arguments of the trainer, instead of these data; `arguments` are fields of `args`.
    """
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # which arguments before have left behind
    os.environ["ACCELERATE_USE_CPU"] = str(environment is None).lower()
    os.environ.update(environment or {})
    model = model or small_model()
    few = {"logging_steps": 1, "lr_scheduler_type": "constant", "seed": 1}
    small = {"balance_block_size": 8, "tokens_per_rank": 160} | (
        {} if isinstance(model, str) else exchanging(model)
    )
    quiet = {"report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False}
    args = hf_distca.DistCATrainingArguments(
        output_dir=folder, **with_planning({**quiet, **few, **small, **arguments})
    )
    documents = [
        {"input_ids": document.tolist(), **(columns or {})}
        for document in random_documents(lengths)
    ]
    dataset: Any = datasets.Dataset.from_list(documents)
    if source == "stream":
        dataset = datasets.IterableDataset.from_generator(
            partial(iter, documents)
        )  # which can be pickled
    elif source == "list":
        dataset = documents
    elif source == "transform":
        dataset = datasets.Dataset.from_dict({"index": range(len(documents))})
        dataset.set_transform(
            lambda batch: {n: [documents[i][n] for i in batch["index"]] for n in documents[0]}
        )
    collator = DataCollatorWithFlattening() if source == "flattened" else None
    data = {"train_dataset": dataset, "eval_dataset": dataset, "data_collator": collator}
    return hf_distca.DistCATrainer(model=model, args=args, **(given or data))


def parameters_hash(model: nn.Module) -> str:
    """A hash of what this rank holds of the parameters."""
    tensors = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    content = b"".join(
        tensor.detach().cpu().contiguous().view(torch.uint8).numpy() for tensor in tensors
    )
    return hashlib.sha256(content).hexdigest()
