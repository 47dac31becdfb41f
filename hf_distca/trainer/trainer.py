"""DistCATrainer: transformers' Trainer on packed documents with balanced core attention."""

from collections.abc import Mapping
from typing import Any

import datasets
from transformers import AutoTokenizer, Trainer

from hf_distca.checks.data_rules import Data
from hf_distca.checks.refusal import given_as
from hf_distca.collator.documents import is_stream
from hf_distca.collator.texts import TextStream, decoded, document_text, tokenized_dataset
from hf_distca.models.loading import load_model
from hf_distca.trainer.mixin import DistCAMixin


def with_tokens(given_arguments: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Return a trainer's arguments with tokens for text.

    `processing_class` makes the tokens, or the tokenizer of a named model.
    """
    arguments = dict(given_arguments)
    args = arguments["args"]
    field = getattr(args, "dataset_text_field", "text")

    def tokenizer_of(name: str) -> Any:
        """Return the tokenizer for the data set of this name; None if there is none."""
        if arguments.get("processing_class") is None and isinstance(model, str):
            try:
                arguments["processing_class"] = AutoTokenizer.from_pretrained(model)
            except (OSError, ValueError) as error:
                facts = {
                    "name": name,
                    "field": field,
                    "model": model,
                    "why": str(error).strip().partition("\n")[0],
                }
                raise Data.NO_SAVED_TOKENIZER.error(**facts) from error
        processor = arguments.get("processing_class")
        tokenizer = getattr(processor, "tokenizer", processor)
        if tokenizer is not None and not _is_tokenizer(tokenizer):
            raise Data.NOT_A_TOKENIZER.error(given=given_as(tokenizer), field=field)
        return tokenizer

    def tokenized(dataset: Any, name: str) -> Any:
        """Return a data set, or each one of a dictionary, with `input_ids`."""
        if isinstance(dataset, dict):
            return {key: tokenized(part, f"{name}[{key!r}]") for key, part in dataset.items()}
        if dataset is None:
            return dataset
        if is_stream(dataset) and not isinstance(dataset, datasets.IterableDataset):
            # Reading the first document may consume it, so every document is looked at when it is
            # read.
            return TextStream(dataset, name, field, tokenizer_of(name))
        with decoded(name):
            document = _first_document(dataset)
        if document is None or (isinstance(document, Mapping) and "input_ids" in document):
            return dataset
        document_text(document, f"document 0 of {name}", field, is_first=True)
        if tokenizer_of(name) is None:
            raise Data.NO_TOKENIZER.error(name=name, field=field)
        if is_stream(dataset):
            return TextStream(dataset, name, field, tokenizer_of(name))
        with args.main_process_first(), decoded(name):
            return tokenized_dataset(dataset, name, field, tokenizer_of(name))

    datasets_with_tokens = {
        name: tokenized(arguments.get(name), name) for name in ("train_dataset", "eval_dataset")
    }
    return arguments | datasets_with_tokens


def _is_tokenizer(value: Any) -> bool:
    """Return whether a value makes tokens: it can be called and ends a sequence."""
    return callable(value) and hasattr(value, "eos_token_id")


def _first_document(dataset: Any) -> Any:
    """Return the first document of a data set or stream; None if there is none."""
    if is_stream(dataset):
        return next(iter(dataset), None)
    return dataset[0] if len(dataset) else None


class DistCATrainer(DistCAMixin, Trainer):
    """transformers' `Trainer` on packed documents with balanced core attention.

    The arguments are those of `transformers.Trainer`; `args` is a `DistCATrainingArguments`. Two
    things are added:

    - `model` may be a name. The model is then loaded with `args.model_init_kwargs`, and gets
      planned attention.
    - A data set without `input_ids` is tokenized with `processing_class`: the text in the column
      `args.dataset_text_field`, with one end-of-sequence token after each document. Streams are
      tokenized as they are read.
    """

    def _prepare_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        model = arguments.get("model")
        if isinstance(model, str):
            options: Any = getattr(arguments["args"], "model_init_kwargs", None) or {}
            arguments = {**arguments, "model": load_model(model, options)}
        if arguments.get("data_collator") is not None:
            return arguments
        return with_tokens(arguments, model)
