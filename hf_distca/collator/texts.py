"""Text to tokens: data sets are tokenized as a whole, streams document by document as they are read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import datasets
import pyarrow as pa
from torch.utils.data import IterableDataset

from hf_distca.collator.documents import READ_BATCH, is_stored
from hf_distca.collator.refusals import Data

CHATS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
"""Columns from which TRL's trainers make tokens and labels."""


def document_text(row: Any, name: str, field: str) -> str:
    """Return the text in a row, called `name` in errors.

    Raise ValueError if there is none that can be tokenized.
    """
    if not isinstance(row, Mapping):
        raise Data.NOT_A_ROW.error(name=name, kind=type(row).__name__)
    if chats := [column for column in CHATS if column in row]:
        raise Data.CHATS.error(name=name, columns=", ".join(map(repr, chats)))
    if field not in row:
        raise Data.NO_TEXT.error(name=name, columns=sorted(row), field=field)
    text = row[field]
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


def check_texts(dataset: Any, name: str, field: str) -> None:
    """Raise ValueError if a stored data set, called `name` in errors, has no tokens, chats or text."""
    if not is_stored(dataset):
        return
    if len(dataset) == 0:
        raise Data.EMPTY.error(name=name)
    if {"input_ids", *CHATS} & set(dataset.column_names):
        return
    if field not in dataset.column_names:
        raise Data.NO_TEXT.error(
            name=f"document 0 of {name}", columns=sorted(dataset.column_names), field=field
        )
    kind = dataset.features.arrow_schema.field(field).type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    tables = dataset.select_columns([field]).with_format("arrow").iter(batch_size=READ_BATCH)
    for number, table in enumerate(tables):
        if table[field].null_count or not is_text:
            for at, text in enumerate(table[field].to_pylist()):
                document_text(
                    {field: text}, f"document {number * READ_BATCH + at} of {name}", field
                )


def tokenize(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Return the tokens of documents, each with one end-of-sequence token, and at most one token at its beginning.

    Texts may contain these tokens, and a tokenizer may add them itself. Nothing is truncated: plans
    handle the length.
    """
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    documents = []
    for tokens in tokenizer(texts, verbose=False)["input_ids"]:
        start, stop = 0, len(tokens)
        while end is not None and stop > 0 and tokens[stop - 1] == end:
            stop -= 1
        while begin is not None and start < stop and tokens[start] == begin:
            start += 1
        beginning = [begin] if start else []
        ending = [] if end is None else [end]
        documents.append([*beginning, *tokens[start:stop], *ending])
    return documents


def tokenized_dataset(dataset: Any, name: str, field: str, tokenizer: Any) -> datasets.Dataset:
    """Return a data set of tokens for a data set with a length, called `name` in errors, whose documents have text."""
    remove = [field]
    if isinstance(dataset, datasets.Dataset):
        remove = list(dataset[0])
    else:
        texts = [
            document_text(dataset[index], f"document {index} of {name}", field)
            for index in range(len(dataset))
        ]
        dataset = datasets.Dataset.from_dict({field: texts})
    options = {"tokenizer": tokenizer, "name": name, "field": field}
    return dataset.map(
        _tokenize_batch,
        batched=True,
        with_indices=True,
        fn_kwargs=options,
        remove_columns=remove,
        desc=f"Tokenizing {name}",
    )


def _tokenize_batch(
    batch: Mapping[str, list[Any]], indices: Sequence[int], tokenizer: Any, name: str, field: str
) -> dict[str, Any]:
    named = zip(indices, batch[field], strict=True)
    texts = [
        document_text({field: text}, f"document {index} of {name}", field) for index, text in named
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
        self.rows, self.name, self.field, self.tokenizer = rows, name, field, tokenizer
        if hasattr(rows, "set_epoch"):
            self.set_epoch: Callable[[int], None] = rows.set_epoch

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for number, row in enumerate(self.rows):
            yield self.tokenized(row, f"document {number} of {self.name}")

    def tokenized(self, row: Any, name: str) -> Mapping[str, Any]:
        """Return a document with tokens.

        Raise ValueError with its `name` if it has neither tokens nor text.
        """
        if isinstance(row, Mapping) and "input_ids" in row:
            return row
        text = document_text(row, name, self.field)
        if self.tokenizer is None:
            raise Data.NO_TOKENIZER.error(name=name, field=self.field)
        return {"input_ids": tokenize([text], self.tokenizer)[0]}
