"""DistCATrainer: transformers' Trainer on packed documents with balanced core attention."""

from collections.abc import Mapping
from typing import Any, cast

import datasets
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from hf_distca.collator.refusals import Data
from hf_distca.plan import ATTENTION_NAME
from hf_distca.refusal import check
from hf_distca.trainer.arguments import DistCAArguments
from hf_distca.trainer.mixin import DistCAMixin
from hf_distca.trainer.refusals import LOADED_ALREADY, given_arguments

CHATS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
"""Columns from which TRL's trainers make tokens and labels."""


class Tokenizing:
    """Tokenize data sets of text; data sets of tokens stay as they are.

    Args:
        field: column with the text.
        processing_class: tokenizer, or processor with a tokenizer; None loads the tokenizer of `model_name` if needed.
    """

    def __init__(self, args: TrainingArguments, field: str, processing_class: Any, model_name: str | None) -> None:
        self._args, self._field, self._model_name = args, field, model_name
        self.processing_class = processing_class

    def tokens_of(self, dataset: Any, name: str) -> Any:
        """Return the data set, or dict of data sets, with a column `input_ids`; errors have the argument's `name`.

        Raises:
            ValueError: the data set holds neither tokens nor text, or holds chats, or there is no tokenizer.
        """
        if isinstance(dataset, dict):
            return {key: self.tokens_of(each, f"{name}[{key!r}]") for key, each in dataset.items()}
        first, field = _first_example(dataset), self._field
        if not isinstance(first, Mapping) or "input_ids" in first:
            return dataset
        if chats := [column for column in CHATS if column in first]:
            raise Data.CHATS.error(name=name, columns=", ".join(map(repr, chats)))
        if not isinstance(first.get(field), str):
            raise Data.NO_TEXT.error(name=name, columns=sorted(first), field=field)
        if self.processing_class is None and self._model_name is not None:
            self.processing_class = AutoTokenizer.from_pretrained(self._model_name)
        if self.processing_class is None:
            raise Data.NO_TOKENIZER.error(name=name, field=field)
        if not isinstance(dataset, (datasets.Dataset, datasets.IterableDataset)):
            dataset, first = datasets.Dataset.from_dict({field: [each[field] for each in dataset]}), {}
        tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        options: dict[str, Any] = {"batched": True, "remove_columns": list({field: None, **first})}
        if isinstance(dataset, datasets.Dataset):
            options["desc"] = f"Tokenizing {name}"
        with self._args.main_process_first():
            return dataset.map(_tokenize, fn_kwargs={"tokenizer": tokenizer, "field": field}, **options)


def _tokenize(batch: Mapping[str, list[str]], tokenizer: Any, field: str) -> dict[str, Any]:
    """Return the tokens of documents, each with an end-of-sequence token at its end."""
    end = tokenizer.eos_token or ""
    texts = [text if text.endswith(end) else text + end for text in batch[field]]
    return {"input_ids": tokenizer(texts, verbose=False)["input_ids"]}  # not truncated: plans handle the length


def _first_example(dataset: Any) -> Any:
    """Return the first example if reading it does not consume it; else None."""
    if isinstance(dataset, datasets.IterableDataset):
        return next(iter(dataset), None)
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and len(dataset):
        return dataset[0]
    return None


class DistCATrainer(DistCAMixin, Trainer):
    """transformers' `Trainer` on packed documents with balanced core attention.

    The arguments are those of `transformers.Trainer`; `args` is a `DistCATrainingArguments`. Two things are added:

    - `model` may be a name. The model is then loaded with `attn_implementation="distca"` and `args.model_init_kwargs`.
    - A data set without `input_ids` is tokenized with `processing_class`: the text in the column
      `args.dataset_text_field`, with an end-of-sequence token after each document.

    Raises:
        ValueError: The model, the arguments or the data set cannot be trained this way. Every rank raises it before
            training begins, with the reason.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Trainer's own __init__ names its arguments; the mixin's takes anything.
        arguments = given_arguments(type(self), super(DistCAMixin, self).__init__, args, kwargs)
        given = dict(arguments.named)
        settings, model = given.get("args"), given.get("model")
        if isinstance(settings, DistCAArguments):
            settings.serve_if_server()  # before a server loads anything
            check((LOADED_ALREADY,), arguments)
            name = model if isinstance(model, str) else None
            if name is not None:
                chosen: Any = getattr(settings, "model_init_kwargs", None) or {}
                chosen = {"attn_implementation": ATTENTION_NAME, "dtype": "float32", **chosen}
                given["model"] = AutoModelForCausalLM.from_pretrained(name, **chosen)
            if given.get("data_collator") is None:
                field = getattr(settings, "dataset_text_field", "text")
                tokenizing = Tokenizing(cast(Any, settings), field, given.get("processing_class"), name)
                for data in ("train_dataset", "eval_dataset"):
                    given |= {data: tokenizing.tokens_of(given[data], data)} if given.get(data) is not None else {}
                if tokenizing.processing_class is not None:
                    given["processing_class"] = tokenizing.processing_class
        super().__init__(**given)
