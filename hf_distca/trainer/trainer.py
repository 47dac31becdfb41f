"""DistCATrainer: transformers' Trainer on packed documents with balanced core attention."""

from collections.abc import Mapping
from typing import Any

import datasets
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer

from hf_distca.collator.refusals import Data
from hf_distca.plan import ATTENTION_NAME
from hf_distca.refusal import check
from hf_distca.trainer.mixin import DistCAMixin
from hf_distca.trainer.refusals import LOADED_ALREADY

CHATS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
"""Columns from which TRL's trainers make tokens and labels."""


def with_tokens(given: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Return a trainer's arguments with tokens for text, by `processing_class` or the tokenizer of a named model."""
    args, given = given["args"], dict(given)
    field = getattr(args, "dataset_text_field", "text")

    def tokenized(dataset: Any, name: str) -> Any:
        if isinstance(dataset, dict):
            return {key: tokenized(each, f"{name}[{key!r}]") for key, each in dataset.items()}
        first: Any = None  # the first example, if reading it does not consume it
        if isinstance(dataset, datasets.IterableDataset):
            first = next(iter(dataset), None)
        elif hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and len(dataset):
            first = dataset[0]
        if not isinstance(first, Mapping) or "input_ids" in first:
            return dataset
        if chats := [column for column in CHATS if column in first]:
            raise Data.CHATS.error(name=name, columns=", ".join(map(repr, chats)))
        if not isinstance(first.get(field), str):
            raise Data.NO_TEXT.error(name=name, columns=sorted(first), field=field)
        if given.get("processing_class") is None and isinstance(model, str):
            given["processing_class"] = AutoTokenizer.from_pretrained(model)
        if given.get("processing_class") is None:
            raise Data.NO_TOKENIZER.error(name=name, field=field)
        if not isinstance(dataset, (datasets.Dataset, datasets.IterableDataset)):
            dataset, first = datasets.Dataset.from_dict({field: [each[field] for each in dataset]}), {}
        tokenizer = getattr(given["processing_class"], "tokenizer", given["processing_class"])
        options: dict[str, Any] = {"batched": True, "remove_columns": list({field: None, **first})}
        if isinstance(dataset, datasets.Dataset):
            options["desc"] = f"Tokenizing {name}"
        with args.main_process_first():
            return dataset.map(_tokenize, fn_kwargs={"tokenizer": tokenizer, "field": field}, **options)

    return given | {name: tokenized(given.get(name), name) for name in ("train_dataset", "eval_dataset")}


def _tokenize(batch: Mapping[str, list[str]], tokenizer: Any, field: str) -> dict[str, Any]:
    """Return the tokens of documents, each with an end-of-sequence token at its end."""
    end = tokenizer.eos_token or ""
    texts = [text if text.endswith(end) else text + end for text in batch[field]]
    return {"input_ids": tokenizer(texts, verbose=False)["input_ids"]}  # not truncated: plans handle the length


class DistCATrainer(DistCAMixin, Trainer):
    """transformers' `Trainer` on packed documents with balanced core attention.

    The arguments are those of `transformers.Trainer`; `args` is a `DistCATrainingArguments`. Two things are added:

    - `model` may be a name. The model is then loaded with `attn_implementation="distca"` and `args.model_init_kwargs`.
    - A data set without `input_ids` is tokenized with `processing_class`: the text in the column
      `args.dataset_text_field`, with an end-of-sequence token after each document.
    """

    def _prepare_given(self, named: dict[str, Any]) -> dict[str, Any]:
        check((LOADED_ALREADY,), named)
        model = named.get("model")
        if isinstance(model, str):
            chosen: Any = getattr(named["args"], "model_init_kwargs", None) or {}
            chosen = {"attn_implementation": ATTENTION_NAME, "dtype": "float32", **chosen}
            named = {**named, "model": AutoModelForCausalLM.from_pretrained(model, **chosen)}
        return named if named.get("data_collator") is not None else with_tokens(named, model)
