"""Text to tokens: data sets are tokenized as a whole, streams document by document."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from torch.utils.data import IterableDataset
from transformers import AutoTokenizer

from hf_distca.checks.data_rules import Data
from hf_distca.checks.refusal import given_as
from hf_distca.collator.documents import READ_BATCH, is_stored, is_stream

SHOWN_BYTES = 10
"""Bytes that an error shows before and after a fault."""
CHATS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
"""Columns from which TRL's trainers make tokens and labels."""


def check_columns(columns: Iterable[str], name: str, field: str) -> None:
    """Raise ValueError unless documents with these columns have text.

    Args:
        name: name of the data set, or of its first document, in errors.
        field: column with the text.
    """
    present = set(columns)
    if field in present:
        return
    chat_columns = [column for column in CHATS if column in present]
    shown = ", ".join(map(repr, chat_columns))
    if is_without_answer(present):
        raise Data.PREFERENCES.error(name=name, columns=shown)
    if chat_columns:
        raise Data.CHATS.error(name=name, columns=shown)
    raise Data.NO_TEXT.error(name=name, columns=sorted(present), field=field)


def is_without_answer(columns: set[str]) -> bool:
    """Return whether documents with these columns are preferences, or prompts alone."""
    has_prompt_alone = "prompt" in columns and "completion" not in columns
    return has_prompt_alone or not columns.isdisjoint(("chosen", "rejected"))


def document_text(row: Any, name: str, field: str, *, is_first: bool = False) -> str:
    """Return the text in a row, called `name` in errors.

    Raise ValueError if there is none that can be tokenized.

    Args:
        is_first: whether the row is the first one, which tells what columns the data has.
    """
    if not isinstance(row, Mapping):
        raise Data.NOT_A_ROW.error(name=name, kind=type(row).__name__)
    if is_first:
        check_columns(row, name, field)
    if field not in row:
        raise Data.NO_TEXT_IN_DOCUMENT.error(name=name, columns=sorted(row), field=field)
    text = row[field]
    if text is None:
        raise Data.MISSING_TEXT.error(name=name, field=field)
    if not isinstance(text, str):
        raise Data.NOT_TEXT.error(name=name, field=field, kind=type(text).__name__)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        character = ascii(text[error.start])
        raise Data.SURROGATE.error(
            name=name, field=field, character=character, at=error.start
        ) from error
    return text


@contextmanager
def decoded(name: str) -> Iterator[None]:
    """Name a data set whose texts cannot be decoded: `datasets` reads any bytes from JSON."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise Data.NOT_UTF8.error(name=name, found=bytes_around(error)) from error


def bytes_around(error: UnicodeDecodeError) -> bytes:
    """Return the bytes that are not UTF-8, and some before and after."""
    return error.object[max(error.start - SHOWN_BYTES, 0) : error.start + SHOWN_BYTES]


def check_texts(dataset: Any, name: str, field: str) -> None:
    """Raise ValueError if a stored data set has no tokens, chats or text, or a chat no messages.

    Args:
        name: name of the data set in errors.
        field: column with the text.
    """
    if not is_stored(dataset):
        return
    if len(dataset) == 0:
        raise Data.EMPTY.error(name=name)
    columns = set(dataset.column_names)
    if "input_ids" in columns:
        return
    chat_columns = [column for column in CHATS if column in columns]
    for column in chat_columns:
        _check_messages(dataset, name, column)
    if chat_columns and not is_without_answer(columns):
        return
    check_columns(columns, name, field)
    kind = dataset.features.arrow_schema.field(field).type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    tables = dataset.select_columns([field]).with_format("arrow").iter(batch_size=READ_BATCH)
    for number, table in enumerate(tables):
        if table[field].null_count or not is_text:
            for index, text in enumerate(table[field].to_pylist(), start=number * READ_BATCH):
                document_text({field: text}, f"document {index} of {name}", field)


def _check_messages(dataset: Any, name: str, column: str) -> None:
    """Raise ValueError if a column of a stored data set has lists and one is empty."""
    kind = dataset.features.arrow_schema.field(column).type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return
    tables = dataset.select_columns([column]).with_format("arrow").iter(batch_size=READ_BATCH)
    for number, table in enumerate(tables):
        counts = pc.fill_null(pc.list_value_length(table[column]), 1).to_numpy()
        for row in np.flatnonzero(counts == 0):
            index = number * READ_BATCH + row
            raise Data.NO_MESSAGES.error(name=f"document {index} of {name}", column=column)


def tokenize(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Return the tokens of documents.

    A document has one end-of-sequence token, and at most one beginning-of-sequence token. Texts may
    contain these tokens, and a tokenizer may add them itself. Nothing is truncated: plans handle
    the length.
    """
    bos_token = tokenizer.bos_token_id
    eos_token = tokenizer.eos_token_id
    documents: list[list[int]] = []
    for tokens in tokenizer(texts, verbose=False)["input_ids"]:
        # Leave out all of these tokens at both ends, and add one of each again.
        start = 0
        stop = len(tokens)
        while eos_token is not None and stop > 0 and tokens[stop - 1] == eos_token:
            stop -= 1
        while bos_token is not None and start < stop and tokens[start] == bos_token:
            start += 1
        beginning = [bos_token] if start > 0 else []
        ending = [] if eos_token is None else [eos_token]
        documents.append([*beginning, *tokens[start:stop], *ending])
    return documents


def tokenized_dataset(dataset: Any, name: str, field: str, tokenizer: Any) -> datasets.Dataset:
    """Return a data set of tokens for a data set with a length whose documents have text.

    Args:
        name: name of the data set in errors.
        field: column with the text.
    """
    if isinstance(dataset, datasets.Dataset):
        text_columns = list(dataset[0])
    else:
        text_columns = [field]
        texts = [
            document_text(dataset[index], f"document {index} of {name}", field)
            for index in range(len(dataset))
        ]
        dataset = datasets.Dataset.from_dict({field: texts})
    return dataset.map(
        _tokenize_batch,
        batched=True,
        with_indices=True,
        fn_kwargs={"tokenizer": tokenizer, "name": name, "field": field},
        remove_columns=text_columns,
        desc=f"Tokenizing {name}",
    )


def _tokenize_batch(
    batch: Mapping[str, list[Any]], indices: Sequence[int], tokenizer: Any, name: str, field: str
) -> dict[str, Any]:
    """Return the tokens of a batch of documents, by the indices of the documents in errors."""
    texts = [
        document_text({field: text}, f"document {index} of {name}", field)
        for index, text in zip(indices, batch[field], strict=True)
    ]
    return {"input_ids": tokenize(texts, tokenizer)}


class TextStream(IterableDataset[Mapping[str, Any]]):
    """Stream whose documents with text are tokenized as they are read.

    Documents with tokens stay as they are.

    Args:
        rows: The documents: a `datasets.IterableDataset`, a torch `IterableDataset` or any other
            iterable.
        name: Name of the stream in errors.
        field: Column with the text.
        tokenizer: The tokenizer. None is for streams whose documents should have tokens.
    """

    def __init__(self, rows: Any, name: str, field: str, tokenizer: Any) -> None:
        self.rows = rows
        self.name = name
        self.field = field
        self.tokenizer = tokenizer
        if hasattr(rows, "set_epoch"):
            self.set_epoch: Callable[[int], None] = rows.set_epoch

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for number, row in enumerate(self.rows):
            yield self.tokenized(row, f"document {number} of {self.name}", is_first=number == 0)

    def tokenized(self, row: Any, name: str, *, is_first: bool) -> Mapping[str, Any]:
        """Return a document with tokens.

        Raise ValueError with its `name` if it has neither tokens nor text.
        """
        if isinstance(row, Mapping) and "input_ids" in row:
            return row
        text = document_text(row, name, self.field, is_first=is_first)
        if self.tokenizer is None:
            raise Data.NO_TOKENIZER.error(name=name, field=self.field)
        return {"input_ids": tokenize([text], self.tokenizer)[0]}


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
