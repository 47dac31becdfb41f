"""Tokens of texts: beginnings and ends of documents, streams, and documents that are no text."""

import datasets
import pytest
from tokenizers import processors
from torch.utils.data import IterableDataset

from hf_distca.checks.data_rules import Data
from hf_distca.collator.streams import StreamPacker
from hf_distca.collator.texts import TextStream, document_text, tokenize, tokenized_dataset
from tests.refused import refused
from tests.trainer.chats import tokenizer

BEGIN, END = 1, 2
TEXTS = ["w1 w2", "[begin] w1 w2", "w1 w2 [end]", "[begin] w1 w2 [end]", "w1 [end] w2", ""]


def adding(template, **tokens):
    """A tokenizer that adds tokens as its template says."""
    made = tokenizer()
    special = [(token, made.convert_tokens_to_ids(token)) for token in ("[begin]", "[end]")]
    made._tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=special
    )
    for name, token in tokens.items():
        setattr(made, name, token)
    return made


def test_one_token_at_the_beginning_and_one_at_the_end():
    begun = [BEGIN, 6, 7, END]
    expected = [[6, 7, END], begun, [6, 7, END], begun, [6, END, 7, END], [END]]
    assert tokenize(TEXTS, tokenizer()) == tokenize(TEXTS, adding("$A [end]")) == expected
    expected = [begun, begun, begun, begun, [BEGIN, 6, END, 7, END], [BEGIN, END]]
    assert (
        tokenize(TEXTS, adding("[begin] $A"))
        == tokenize(TEXTS, adding("[begin] $A [end]"))
        == expected
    )
    # As in GPT-2, one token is both.
    assert tokenize(["w1", "[end] w1 [end]", ""], adding("[end] $A [end]", bos_token="[end]")) == [
        [END, 6, END],
        [END, 6, END],
        [END],
    ]
    # Without an end-of-sequence token none is added.
    assert tokenize(["w1", "w1 [end]"], adding("$A", eos_token=None, bos_token=None)) == [
        [6],
        [6, END],
    ]


class Rows(IterableDataset):
    """A stream of torch, with an epoch."""

    def __init__(self, rows):
        self.rows = rows
        self.epoch = 0

    def __iter__(self):
        return iter(self.rows)

    def set_epoch(self, epoch):
        self.epoch = epoch


EXAMPLES = [{"text": f"w{number}"} for number in range(5)]


@pytest.mark.parametrize(
    ("make_rows", "expected"),
    [
        (Rows, ["w0", "w2", "w4"]),
        (
            lambda texts: datasets.Dataset.from_list(texts).to_iterable_dataset(num_shards=2),
            ["w0", "w1", "w2"],
        ),
    ],
    ids=["rows", "shards"],
)
def test_a_rank_tokenizes_its_share_of_a_stream(make_rows, expected):
    tokenized = []

    class Counting:
        bos_token_id = None
        eos_token_id = END

        def __call__(self, texts, **_):
            tokenized.extend(texts)
            return tokenizer()(texts)

    stream = TextStream(make_rows(EXAMPLES), "train_dataset", "text", Counting())
    (batch,) = StreamPacker(stream, 2, 0, 8)
    assert tokenized == expected
    tokens = [token for text in expected for token in (int(text[1:]) + 5, END)]
    assert batch["input_ids"].tolist() == [tokens]


def test_a_stream_of_texts_keeps_rows_that_have_tokens_and_has_the_epoch_of_its_rows():
    rows = Rows([{"input_ids": [3], "labels": [3]}, *EXAMPLES])
    stream = TextStream(rows, "train_dataset", "text", tokenizer())
    with_tokens, of_text, *_ = stream
    assert with_tokens == {"input_ids": [3], "labels": [3]}
    assert of_text == {"input_ids": [5, END]}
    # The packer's epoch is that of the rows.
    StreamPacker(stream, 1, 0, 8).set_epoch(7)
    assert stream.rows.epoch == 7
    stream.set_epoch(8)
    assert stream.rows.epoch == 8
    assert not hasattr(TextStream(EXAMPLES, "train_dataset", "text", None), "set_epoch")


GOOD = {"text": "w1"}


@pytest.mark.parametrize(
    ("row", "entry", "values"),
    [
        ({"text": None}, Data.MISSING_TEXT, {"field": "text"}),
        ({"text": ["w1"]}, Data.NOT_TEXT, {"kind": "list"}),
        ({"other": "w1"}, Data.NO_TEXT_IN_DOCUMENT, {"columns": ["other"], "field": "text"}),
        ({"text": "w1 \ud800"}, Data.SURROGATE, {"character": "'\\ud800'", "at": 3}),
        (None, Data.NOT_A_ROW, {"kind": "NoneType"}),
        ("w1", Data.NOT_A_ROW, {"kind": "str"}),
    ],
)
def test_documents_without_text_are_named(row, entry, values):
    rows = [*[GOOD] * 3, row]
    with refused(entry, name="document 3 of train_dataset", **values):
        tokenized_dataset(rows, "train_dataset", "text", tokenizer())
    stream = TextStream(Rows(rows), "train_dataset", "text", tokenizer())
    with refused(entry, name="document 3 of train_dataset", **values):
        list(stream)
    with refused(entry, name="document 1 of rank 1's share of train_dataset", **values):
        list(StreamPacker(stream, 2, 1, 8))
    streamed = datasets.IterableDataset.from_generator(lambda: iter(rows))
    with refused(entry, name="document 3 of rank 0's share of train_dataset", **values):
        list(StreamPacker(TextStream(streamed, "train_dataset", "text", tokenizer()), 1, 0, 8))


def test_a_text_beside_a_prompt_is_the_document():
    row = {"text": "w1", "prompt": "w2", "messages": []}
    assert document_text(row, "document 0", "text", is_first=True) == "w1"


def test_documents_of_stored_texts_are_named():
    stored = datasets.Dataset.from_dict({"text": ["w1"] * 1500 + [None], "source": range(1501)})
    assert tokenized_dataset(stored.select([1, 2]), "train_dataset", "text", tokenizer())[:] == {
        "input_ids": [[6, END]] * 2
    }
    with refused(Data.MISSING_TEXT, name="document 1500 of train_dataset", field="text"):
        tokenized_dataset(stored, "train_dataset", "text", tokenizer())
