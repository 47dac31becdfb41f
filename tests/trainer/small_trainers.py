"""Trainers of small models on few documents, for tests."""

import os
from collections.abc import Sequence
from typing import Any

import accelerate
import datasets
from transformers import DataCollatorWithFlattening

import hf_distca
from tests.models import random_documents, small_model

LENGTHS = [150, 3, 17, 60, 1, 33, 90, 45, 7, 120, 64, 31]


def make_trainer(
    folder: str,
    source: str = "packed",
    lengths: Sequence[int] = LENGTHS,
    model: Any = None,
    columns: dict[str, Any] | None = None,
    classes: tuple[type, type] = (hf_distca.DistCATrainer, hf_distca.DistCATrainingArguments),
    **arguments: Any,
) -> Any:
    """A trainer on CPU, on as many ranks as there are.

    Args:
        folder: for its output.
        source: what the data is: "packed", a data set with a length; "list"; "transform", a data set that makes its
            examples when it is asked for them; "stream"; or "flattened", with a padding-free collator.
        lengths: of the documents.
        model: what is trained; a small LLaMA by default.
        columns: of every example, besides input_ids.
        classes: of the trainer and of its arguments.
        arguments: of the trainer, instead of the ones here.
    """
    os.environ["ACCELERATE_USE_CPU"] = "true"
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    make, make_arguments = classes
    args = make_arguments(
        output_dir=folder,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **{
            "logging_steps": 1,
            "lr_scheduler_type": "constant",
            "dataloader_num_workers": 0,
            "balance_block_size": 8,
            "tokens_per_rank": 160,
            "seed": 1,
            **arguments,
        },
    )
    documents = [{"input_ids": document.tolist(), **(columns or {})} for document in random_documents(lengths)]
    if source == "stream":
        dataset: Any = datasets.IterableDataset.from_generator(Documents(documents))
    elif source == "list":
        dataset = documents
    elif source == "transform":
        dataset = datasets.Dataset.from_dict({"index": range(len(documents))})
        dataset.set_transform(lambda batch: {n: [documents[i][n] for i in batch["index"]] for n in documents[0]})
    else:
        dataset = datasets.Dataset.from_list(documents)
    return make(
        model=model or small_model(),
        args=args,
        train_dataset=dataset,
        eval_dataset=dataset,
        data_collator=DataCollatorWithFlattening() if source == "flattened" else None,
    )


class Documents:
    """Gives documents one after another, as often as asked; unlike a lambda it can be pickled."""

    def __init__(self, documents: list[dict]) -> None:
        self._documents = documents

    def __call__(self):
        yield from self._documents
