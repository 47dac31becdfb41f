"""Wrong inputs of users, and the answer that each of them gets.

A row has a name, what is given, and what the user sees. An ellipsis in an answer stands for
anything, FOLDER for the folder of the training. No step may begin before an error.
"""

import logging
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    LlamaForCausalLM,
    TrainerCallback,
)

import hf_distca
from tests.models_and_batches import SMALL, small_model
from tests.trainer.chats import tokenizer
from tests.trainer.small_trainers import make_trainer

CPU = torch.device("cpu")
TOKENS = [{"input_ids": [3, 4, 5]}] * 4
TEXTS = [{"text": "w1 w2"}] * 4
CHATS = [{"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]}]
stored = datasets.Dataset.from_list
Rows = list[tuple[str, Callable[..., Any], str]]


class Stream(IterableDataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


class NoStep(TrainerCallback):
    def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("a step began")


def train(
    folder: Any, rows: Any = TOKENS, model: Any = None, resume: Any = None, **options: Any
) -> None:
    """Train with DistCATrainer; `options` are arguments of the trainer, or fields of its `args`."""
    given: dict[str, Any] = {"train_dataset": rows, "processing_class": tokenizer()}
    given |= {
        name: options.pop(name) for name in ("eval_dataset", "processing_class") if name in options
    }
    options = {"max_steps": 1, "save_strategy": "no", **options}
    trainer = make_trainer(str(folder), model=model, given=given, **options)
    trainer.add_callback(NoStep())
    trainer.train(resume_from_checkpoint=resume)


def train_chats(folder: Any, rows: Any, model: Any = None) -> None:
    """Train with DistCASFTTrainer."""
    options = {
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "max_steps": 1,
        "disable_tqdm": True,
    }
    args = hf_distca.DistCASFTConfig(str(folder), **options)
    given = {"train_dataset": rows, "processing_class": tokenizer(), "callbacks": [NoStep()]}
    hf_distca.DistCASFTTrainer(model or small_model(), args, **given).train()


def latin(*texts: str) -> pa.Array:
    """Texts in Latin-1 where Arrow expects UTF-8, as its reader of JSON lets them be."""
    return pa.array([text.encode("latin-1") for text in texts]).view(pa.string())


def saved_model(folder: Path) -> str:
    """Save a model without a tokenizer."""
    small_model().save_pretrained(folder)
    return str(folder)


def answer_of(function: Callable[[], None], folder: Any) -> str:
    """The message of the error that a function raises, with FOLDER for the folder."""
    try:
        function()
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        return str(error).replace(str(folder), "FOLDER")
    return "no error"


def assert_said(seen: str, answer: str) -> None:
    expected = ".*".join(map(re.escape, answer.split("…")))
    assert re.fullmatch(expected, seen, re.S), seen


# Data

ONE_SET = "training takes the documents of one data set; choose one: "
BY_NUMBER = "but documents are read by number, not by column; make a data set of "
NOT_GIVEN = (
    "it gives no documents, neither by number nor one after another; give a datasets.Dataset, …"
)
LOADED = "but names and files are not loaded here; load it: "
A_ROW = (
    "but a document is a dictionary of columns, such as {'input_ids': [1, 2]} or {'text': 'a b'}; "
    "give dictionaries, …"
)
NO_VALUE = (
    "has None in 'text', but a document is a text; remove such documents, as with "
    "dataset.filter(lambda e: e['text'] is not None)"
)
A_TEXT = (
    "but a document is a text; set dataset_text_field to the column with the text, or make a text "
    "of each value"
)
NEITHER = (
    "but it has neither tokens in 'input_ids' nor text in 'text'; set dataset_text_field to the "
    "column with the text"
)
A_LIST = (
    "but a document has one list of integers there, one for each token; make tokens of a text with "
    "the tokenizer, or remove such documents"
)
WITHOUT_ANSWERS = (
    "and no 'input_ids', but these are preferences or prompts without an answer, and no documents; "
    "use hf_distca.DistCADPOTrainer or DistCARewardTrainer for preferences, and …"
)
NO_WEIGHT = "a training would have the loss 0 and change no weight: "
FIRST = "document 0 of train_dataset"
ONE_TOKEN = (
    "documents of train_dataset has more than one token, but a token is predicted from tokens "
    "before it, so a training would change no weight; give longer documents; …"
)
DATA: Rows = [
    (
        "a DatasetDict, its split forgotten",
        lambda: datasets.DatasetDict(train=stored(TOKENS), test=stored(TOKENS)),
        (
            "train_dataset is a dictionary (DatasetDict) of the data sets 'train', 'test', but "
            f"{ONE_SET}train_dataset['train']; …"
        ),
    ),
    (
        "a DatasetDict of texts",
        lambda: datasets.DatasetDict(train=stored(TEXTS)),
        (
            "train_dataset is a dictionary (DatasetDict) of the data sets 'train', but "
            f"{ONE_SET}train_dataset['train']; …"
        ),
    ),
    (
        "an IterableDatasetDict",
        lambda: datasets.IterableDatasetDict(train=stored(TOKENS).to_iterable_dataset()),
        "train_dataset is a dictionary (IterableDatasetDict) of the data sets 'train', but …",
    ),
    (
        "data sets by name",
        lambda: {"a": TOKENS},
        f"train_dataset is a dictionary (dict) … {ONE_SET}train_dataset['a']; …",
    ),
    (
        "columns in a dictionary",
        lambda: {"input_ids": [[3, 4]]},
        (
            f"train_dataset is a dictionary (dict) of the columns 'input_ids', {BY_NUMBER}the "
            "columns: datasets.Dataset.from_dict(dict(train_dataset))"
        ),
    ),
    (
        "what a tokenizer returns for several texts",
        lambda: tokenizer()(["w1 w2", "w3"]),
        (
            "train_dataset is a dictionary (BatchEncoding) of the columns 'input_ids', "
            f"'attention_mask', {BY_NUMBER}…"
        ),
    ),
    (
        "a table of pandas",
        lambda: stored(TOKENS).to_pandas(),
        f"train_dataset is a table (DataFrame of pandas), {BY_NUMBER}…",
    ),
    (
        "a table of pyarrow",
        lambda: stored(TOKENS).data.table,
        f"train_dataset is a table (Table of pyarrow), {BY_NUMBER}…",
    ),
    (
        "the path of a file",
        lambda: "texts.jsonl",
        (
            "train_dataset is the text 'texts.jsonl', "
            f"{LOADED}train_dataset=hf_distca.load_documents('texts.jsonl')"
        ),
    ),
    (
        "a Path",
        lambda: Path("texts"),
        f"train_dataset is the text 'texts', {LOADED}…load_documents('texts')",
    ),
    ("a number", lambda: 5, f"train_dataset is 5, but {NOT_GIVEN}"),
    (
        "a function that yields",
        lambda: DATA.__iter__,
        (
            "train_dataset is the function __iter__, but it gives no documents before it is "
            "called; make a stream of it: datasets.IterableDataset.from_generator(__iter__)"
        ),
    ),
    ("a class", lambda: datasets.Dataset, f"train_dataset is the class Dataset, but {NOT_GIVEN}"),
    (
        "a DataLoader",
        lambda: DataLoader(stored(TOKENS)),
        f"train_dataset is of the type DataLoader, but {NOT_GIVEN}",
    ),
    ("strings instead of rows", lambda: ["hello", "you"], f"{FIRST} is of the type str, {A_ROW}"),
    ("a list of tokens", lambda: [3, 4, 5], f"{FIRST} is of the type int, {A_ROW}"),
    ("lists of tokens", lambda: [[3, 4], [5]], f"{FIRST} is of the type list, {A_ROW}"),
    (
        "a tensor of tokens",
        lambda: torch.tensor([[3, 4]]),
        f"{FIRST} is of the type Tensor, {A_ROW}",
    ),
    (
        "a row that is missing",
        lambda: [*TEXTS, None],
        f"document 4 of train_dataset is of the type NoneType, {A_ROW}",
    ),
    (
        "a row of tokens that is missing",
        lambda: [*TOKENS, None],
        f"document 4 of train_dataset is of the type NoneType, {A_ROW}",
    ),
    (
        "no documents",
        list,
        "train_dataset has no documents, but training needs documents; give at least one document",
    ),
    (
        "a stream without documents",
        lambda: Stream([]),
        "train_dataset has no documents, but training needs documents; …",
    ),
    ("no data", lambda: None, "Trainer: training requires a train_dataset."),
    (
        "a text that is None",
        lambda: [{"text": None}],
        f"{FIRST} {NO_VALUE}",
    ),
    (
        "a text that is a number",
        lambda: [{"text": 3}],
        f"{FIRST} has a value of the type int in 'text', {A_TEXT}",
    ),
    (
        "a list of texts",
        lambda: [{"text": ["w1"]}],
        f"{FIRST} has a value of the type list in 'text', {A_TEXT}",
    ),
    (
        "a stored text that is None",
        lambda: stored([*TEXTS, {"text": None}]),
        f"document 4 of train_dataset {NO_VALUE}",
    ),
    (
        "a text in another column",
        lambda: stored([{"content": "w1", "source": 1}]),
        f"{FIRST} has the columns ['content', 'source'], {NEITHER}",
    ),
    (
        "a text in another column of a stream",
        lambda: Stream([{"content": "w1"}]),
        f"document 0 of rank 0's share of train_dataset has the columns ['content'], {NEITHER}",
    ),
    (
        "a text in another column of one document",
        lambda: [*TEXTS, {"content": "w1"}],
        (
            "document 4 of train_dataset has the columns ['content'], but it has no text in "
            "'text', which the first document has; give it a text there, or remove such documents"
        ),
    ),
    (
        "a text in Latin-1 of a stored data set",
        lambda: datasets.Dataset(pa.table({"text": latin("a", "déjà vu")})),
        (
            r"train_dataset has a text with the bytes b'd\xe9j\xe0 vu', but they are not UTF-8, "
            "which text must be; convert the file that the data set was made of, such as with "
            "iconv -f LATIN1 -t UTF-8"
        ),
    ),
    ("no text in empty texts", lambda: [{"text": ""}], f"none of the 1 {ONE_TOKEN}"),
    (
        "chats without TRL",
        lambda: stored(CHATS),
        (
            f"{FIRST} has 'messages' and no 'input_ids', but chat templates and prompts are "
            "applied by TRL's SFTTrainer only; use hf_distca.DistCASFTTrainer with "
            "DistCASFTConfig"
        ),
    ),
    (
        "prompts without TRL",
        lambda: [{"prompt": "w1", "completion": "w2"}],
        f"{FIRST} has 'prompt', 'completion' and …",
    ),
    (
        "preferences",
        lambda: stored([{"chosen": "w1", "rejected": "w2"}]),
        f"{FIRST} has 'chosen', 'rejected' {WITHOUT_ANSWERS}",
    ),
    (
        "prompts without answers",
        lambda: Stream([{"prompt": "w1"}]),
        f"document 0 of rank 0's share of train_dataset has 'prompt' {WITHOUT_ANSWERS}",
    ),
    (
        "tokens for one document only",
        lambda: [*TOKENS, {"text": "w1"}],
        "document 4 of train_dataset has no column 'input_ids'; …",
    ),
    (
        "tokens that are text",
        lambda: [{"input_ids": "w1"}],
        f"{FIRST} has 'w1' in 'input_ids', {A_LIST}",
    ),
    (
        "tokens that are None",
        lambda: [{"input_ids": None}],
        f"{FIRST} has None in 'input_ids', {A_LIST}",
    ),
    (
        "one token",
        lambda: [{"input_ids": 3}],
        f"{FIRST} has 3 in 'input_ids', {A_LIST}",
    ),
    (
        "tokens of tokenizer(…, return_tensors='pt')",
        lambda: [{"input_ids": torch.tensor([[3, 4]])}],
        (
            f"{FIRST} has lists of lists, or a tensor of several dimensions, in 'input_ids', but a "
            "document has one list of integers there, one for each token; tokenize each document "
            "by itself, without return_tensors"
        ),
    ),
    (
        "fractions as tokens",
        lambda: [{"input_ids": [0.5]}],
        (
            f"{FIRST} has 0.5 at position 0 of 'input_ids', but tokens and labels are integers; "
            "give the ids that the tokenizer returns: tokenizer(text).input_ids"
        ),
    ),
    (
        "a class as label",
        lambda: [{"input_ids": [3, 4], "labels": 1}],
        (
            f"{FIRST} has 1 in 'labels', but classes of whole documents cannot be labels: each "
            "token needs one; remove the column 'labels'; each token then predicts the next"
        ),
    ),
    (
        "labels longer than the tokens",
        lambda: [{"input_ids": [3, 4], "labels": [3, 4, 5]}],
        (
            f"{FIRST} has 3 labels for 2 input_ids, but every token needs a label; give one label "
            "per token, …"
        ),
    ),
    (
        "padding",
        lambda: [{"input_ids": [3, 0], "attention_mask": [1, 0]}],
        (
            f"{FIRST} has an attention_mask other than a 1 for each of its 2 input_ids, but "
            "documents are packed without padding, …; remove the column, or tokenize with "
            "padding=False; …"
        ),
    ),
    (
        "a column that the model takes",
        lambda: stored([{"input_ids": [3, 4], "label": 1}]),
        (
            "train_dataset has columns that the model takes and a packed batch cannot carry: "
            "['label'], but it carries only 'input_ids', and optionally 'labels', …; remove them, "
            "as with dataset.remove_columns(['label'])"
        ),
    ),
    (
        "positions",
        lambda: [{"input_ids": [3, 4], "position_ids": [0, 1]}],
        (
            f"{FIRST} has columns that the model takes …: ['position_ids'], but it carries only "
            "'input_ids', …; positions are made in packing; remove them, …"
        ),
    ),
    (
        "labels of -100 alone",
        lambda: [{"input_ids": [3, 4], "labels": [-100, -100]}],
        (
            f"none of the 1 documents of train_dataset has a target, but {NO_WEIGHT}all labels are "
            "-100 after the first token of each document, which nothing predicts; give labels to "
            "the tokens of the answers, or leave the column 'labels' out, …"
        ),
    ),
    ("documents of one token", lambda: [{"input_ids": [3]}] * 2, f"none of the 2 {ONE_TOKEN}"),
    (
        "a document without tokens",
        lambda: [{"input_ids": []}],
        f"{FIRST} is empty, but a document needs a token; …",
    ),
    (
        "tokens of another tokenizer",
        lambda: [{"input_ids": [3, 64]}],
        (
            f"{FIRST} has the token id 64 at position 1, but the model's embedding has the ids 0 "
            "to 63; use the model's own tokenizer, or enlarge the embedding: "
            "model.resize_token_embeddings(len(tokenizer))"
        ),
    ),
    (
        "-100 as a token",
        lambda: [{"input_ids": [3, -100]}],
        (
            f"{FIRST} has the token id -100 at position 1, but token ids begin at 0; give the ids "
            "of the tokenizer; -100 is for labels alone"
        ),
    ),
    (
        "a document that is too long",
        lambda: [*TOKENS, {"input_ids": [3] * 161}],
        (
            "1 of 5 documents of train_dataset are longer than ranks · tokens_per_rank = 160 "
            "tokens, such as document 4 with 161, but a document must fit; raise tokens_per_rank, "
            "use more ranks, or set long_documents: …"
        ),
    ),
    (
        "lengths that are text",
        lambda: stored([{"input_ids": [3, 4], "length": "two"}]),
        (
            "the column 'length' of lengths of train_dataset has the type …, but lengths are one "
            "integer per document; …"
        ),
    ),
    (
        "a length that is missing",
        lambda: stored([{"input_ids": [3], "length": 1}, {"input_ids": [3], "length": None}]),
        (
            "document 1 of train_dataset has None in its column 'length' of lengths, but a length "
            "is an integer; remove the column: lengths are then computed from input_ids"
        ),
    ),
    (
        "lengths of something else",
        lambda: [{"input_ids": [3, 4], "length": 9}],
        (
            f"{FIRST} has 2 input_ids, but its column 'length' says 9; remove or recompute the "
            "column 'length'"
        ),
    ),
]


@pytest.mark.parametrize(("rows", "answer"), [pytest.param(*row[1:], id=row[0]) for row in DATA])
def test_data(rows, answer, tmp_path):
    assert_said(answer_of(lambda: train(tmp_path, rows()), tmp_path), answer)


def eval_of(rows: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda folder: train(folder, eval_dataset=rows())


def classifier(auto: Any) -> Any:
    config = AutoConfig.for_model("llama", **SMALL)
    return auto.from_config(config, attn_implementation="distca")


def of_model(make: Callable[[], Any]) -> Callable[[Any], None]:
    """Make a trainer of what is given as its model."""

    def use(folder: Any) -> None:
        args = hf_distca.DistCATrainingArguments(str(folder), use_cpu=True, report_to=[])
        hf_distca.DistCATrainer(make(), args, train_dataset=TOKENS)

    return use


def dispatch(
    model: Any = None, config: Any = hf_distca.DistCAConfig, **options: Any
) -> Callable[[Any], None]:
    """Call make_dispatcher; `model` and `config` make what is given."""
    return lambda _: hf_distca.make_dispatcher(
        (model or small_model)(),
        config(),
        CPU,
        **{name: value() for name, value in options.items()},
    ).close()


def in_parallel() -> Any:
    return torch.nn.DataParallel(small_model())


MODEL = (
    "but hf_distca changes the layers of a loaded model of transformers; pass "
    "AutoModelForCausalLM.from_pretrained(…"
)
PREPARED = (
    "LlamaForCausalLM is wrapped or compiled already, as {}, but hf_distca changes the model "
    "before that; pass the model itself: call make_dispatcher, or make the trainer, before "
    "Accelerator.prepare, DDP, FSDP, DeepSpeed and torch.compile"
)
CAUSAL = (
    "but labels of packed documents are their next tokens: …; load the model with "
    "AutoModelForCausalLM; …"
)
SETTINGS_NEEDED = (
    "but hf_distca needs its settings, such as tokens_per_rank; pass DistCATrainingArguments; …"
)
GIVEN: Rows = [
    # Evaluation data
    (
        "a DatasetDict among evaluation data",
        eval_of(lambda: {"own": datasets.DatasetDict(test=stored(TOKENS))}),
        (
            "eval_dataset['own'] is a dictionary (DatasetDict) of the data sets 'test', but "
            f"{ONE_SET}eval_dataset['own']['test']; …"
        ),
    ),
    (
        "a path as evaluation data",
        eval_of(lambda: "texts"),
        f"eval_dataset is the text 'texts', {LOADED}eval_dataset=…",
    ),
    (
        "evaluation data of strings",
        eval_of(lambda: ["a"]),
        f"document 0 of eval_dataset is of the type str, {A_ROW}",
    ),
    # Tokenizers
    (
        "text without a tokenizer",
        lambda folder: train(folder, TEXTS, processing_class=None),
        (
            "train_dataset has text in 'text' and no tokens in 'input_ids', but there is no "
            "tokenizer; pass the model's tokenizer as processing_class"
        ),
    ),
    (
        "text with a model saved without its tokenizer",
        lambda folder: train(
            folder, TEXTS, model=saved_model(folder / "model"), processing_class=None
        ),
        (
            "train_dataset needs a tokenizer for its text in 'text', but none can be loaded from "
            "FOLDER/model (…); save the model's tokenizer there, "
            "tokenizer.save_pretrained('FOLDER/model'), or pass it as processing_class"
        ),
    ),
    (
        "the name of a tokenizer",
        lambda folder: train(folder, TEXTS, processing_class="gpt2"),
        (
            "processing_class is 'gpt2', but it is no tokenizer; load it: "
            "processing_class=AutoTokenizer.from_pretrained(name)"
        ),
    ),
    (
        "the class of a tokenizer",
        lambda folder: train(folder, processing_class=AutoTokenizer),
        "processing_class is <class '….AutoTokenizer'>, but it is no tokenizer; load it: …",
    ),
    (
        "text with a processor of images",
        lambda folder: train(folder, TEXTS, processing_class=SimpleNamespace(size=3)),
        (
            "processing_class is of the type SimpleNamespace, but it cannot tokenize the text in "
            "'text'; pass …"
        ),
    ),
    # Models
    (
        "a sequence classifier",
        of_model(partial(classifier, AutoModelForSequenceClassification)),
        (
            "LlamaForSequenceClassification computes transformers' loss "
            f"ForSequenceClassification, {CAUSAL}"
        ),
    ),
    (
        "a token classifier",
        of_model(partial(classifier, AutoModelForTokenClassification)),
        (
            "LlamaForTokenClassification computes transformers' loss ForTokenClassification, "
            f"{CAUSAL}"
        ),
    ),
    (
        "a model for answers",
        of_model(partial(classifier, AutoModelForQuestionAnswering)),
        f"LlamaForQuestionAnswering computes transformers' loss ForQuestionAnswering, {CAUSAL}",
    ),
    (
        "a config as model",
        of_model(lambda: small_model().config),
        f"model is of the type LlamaConfig, {MODEL}",
    ),
    (
        "a class as model",
        of_model(lambda: LlamaForCausalLM),
        f"model is the class LlamaForCausalLM, {MODEL}",
    ),
    (
        "a Path as model",
        of_model(lambda: Path("llama")),
        f"model is of the type PosixPath, {MODEL}",
    ),
    (
        "a module of torch",
        of_model(lambda: torch.nn.Linear(2, 2)),
        f"model is of the type Linear, {MODEL}",
    ),
    (
        "a model that is not there",
        lambda folder: train(folder, model=f"{folder}/llama"),
        "Repo id must be …: 'FOLDER/llama'. …",  # of huggingface_hub
    ),
    ("a wrapped model", of_model(in_parallel), PREPARED.format("DataParallel")),
    ("make_dispatcher after prepare()", dispatch(in_parallel), PREPARED.format("DataParallel")),
    (
        "make_dispatcher after torch.compile",
        dispatch(lambda: torch.compile(small_model())),
        PREPARED.format("OptimizedModule"),
    ),
    (
        "the name of a model in make_dispatcher",
        dispatch(lambda: "gpt2"),
        f"model is 'gpt2', {MODEL}",
    ),
    # Arguments of data
    (
        "columns that are kept",
        lambda folder: train(
            folder, stored([{"input_ids": [3, 4], "source": 1}]), remove_unused_columns=False
        ),
        (
            "train_dataset has columns that a packed batch cannot carry: ['source'], …; remove "
            "them with dataset.remove_columns(['source']), or set remove_unused_columns=True, …"
        ),
    ),
    (
        "answers that are cut off",
        lambda folder: train(
            folder,
            [{"input_ids": [3] * 161, "labels": [-100] * 160 + [3]}],
            long_documents="truncate",
        ),
        (
            f"none of the 1 documents of train_dataset has a target, but {NO_WEIGHT}"
            "long_documents='truncate' cuts documents to 160 tokens, and all labels before are "
            "-100; raise tokens_per_rank, or set long_documents='split'"
        ),
    ),
    (
        "a document that is too long for a rank",
        lambda folder: train(folder, [{"input_ids": [3] * 161}], document_layout="whole"),
        (
            "1 of 1 documents of train_dataset are longer than tokens_per_rank = 160 tokens, such "
            "as document 0 with 161, but documents stay whole on a rank; raise tokens_per_rank, "
            "set document_layout='auto' …"
        ),
    ),
    # Arguments
    (
        "settings in a dictionary",
        dispatch(config=lambda: {"tokens_per_rank": 64}),
        (
            "config is {'tokens_per_rank': 64}, but make_dispatcher needs the settings of "
            "hf_distca; pass hf_distca.DistCAConfig(…"
        ),
    ),
    (
        "no settings",
        dispatch(config=lambda: None),
        "config is None, but make_dispatcher needs the settings of hf_distca; …",
    ),
    (
        "ranks as a list",
        dispatch(mesh=lambda: [0]),
        "mesh is [0], but ranks are named by a mesh or by a group; pass …",
    ),
    (
        "a trainer without args",
        lambda _: hf_distca.DistCATrainer(small_model(), train_dataset=TOKENS),
        f"args are NoneType, {SETTINGS_NEEDED}",
    ),
    (
        "settings without a trainer's",
        lambda _: hf_distca.DistCATrainer(small_model(), hf_distca.DistCAConfig()),
        f"args are DistCAConfig, {SETTINGS_NEEDED}",
    ),
    (
        "a profile that is not there",
        lambda folder: train(folder, device_profile="nosuch.json"),
        (
            "there is no device profile at 'nosuch.json' (FileNotFoundError…), but it is neither a "
            "profile of the package nor a file that hf-distca profile wrote; give one of cpu, "
            "h100, h200, or such a file"
        ),
    ),
    (
        "no epochs",
        lambda folder: train(folder, num_train_epochs=0, max_steps=-1),
        (
            "num_train_epochs=0 and max_steps=-1 are set, but training would end before its first "
            "step; set …"
        ),
    ),
    # With TRL
    (
        "a DatasetDict with TRL",
        lambda folder: train_chats(folder, datasets.DatasetDict(train=stored(CHATS))),
        (
            "train_dataset is a dictionary (DatasetDict) of the data sets 'train', but "
            f"{ONE_SET}train_dataset['train']; …"
        ),
    ),
    (
        "rows in a list with TRL",
        lambda folder: train_chats(folder, CHATS),
        "`train_dataset` must be a `Dataset` or `IterableDataset`, got `list`.",
    ),
    (
        "a text that is None with TRL",
        lambda folder: train_chats(folder, stored([*TEXTS, {"text": None}])),
        f"document 4 of train_dataset {NO_VALUE}",
    ),
    (
        "a text in another column with TRL",
        lambda folder: train_chats(folder, stored([{"content": "w1"}])),
        f"train_dataset has the columns ['content'], {NEITHER}",
    ),
    (
        "preferences with TRL",
        lambda folder: train_chats(folder, stored([{"chosen": "w1", "rejected": "w2"}])),
        f"train_dataset has 'chosen', 'rejected' {WITHOUT_ANSWERS}",
    ),
    (
        "prompts without answers with TRL",
        lambda folder: train_chats(folder, stored([{"prompt": "w1"}])),
        f"train_dataset has 'prompt' {WITHOUT_ANSWERS}",
    ),
    (
        "a chat without messages with TRL",
        lambda folder: train_chats(folder, stored([*CHATS, {"messages": []}])),
        "document 1 of train_dataset has no messages in 'messages', but a chat has at least one …",
    ),
    (
        "no documents with TRL",
        lambda folder: train_chats(folder, stored([])),
        "train_dataset has no documents, but …",
    ),
    (
        "a classifier with TRL",
        lambda folder: train_chats(
            folder, stored(CHATS), classifier(AutoModelForSequenceClassification)
        ),
        (
            "LlamaForSequenceClassification computes transformers' loss "
            f"ForSequenceClassification, {CAUSAL}"
        ),
    ),
    # Files
    (
        "a file that is not there",
        lambda folder: hf_distca.load_documents(folder / "a.txt"),
        "there is no file or folder 'FOLDER/a.txt', but documents are read from it; give …",
    ),
]


@pytest.mark.parametrize(("use", "answer"), [pytest.param(*row[1:], id=row[0]) for row in GIVEN])
def test_what_is_given(use, answer, tmp_path):
    assert_said(answer_of(lambda: use(tmp_path), tmp_path), answer)


def test_transformers_says_that_a_model_without_a_head_has_no_loss(tmp_path):
    given = {"train_dataset": TOKENS}
    trainer = make_trainer(str(tmp_path), model=classifier(AutoModel), given=given, max_steps=1)
    with pytest.raises(ValueError, match="The model did not return a loss from the inputs"):
        trainer.train()


# Settings

TOKENS_MESSAGE = "tokens_per_rank must be a number of tokens, such as 32768 or '32k', got …"
BYTES_MESSAGE = (
    "planning member exchange_buffer_bytes must be a number of bytes, such as 134217728 or "
    "'128MiB', got …"
)
NODES_MESSAGE = (
    "ranks_per_node must be one number of ranks, a number for each node such as '8,8,4', or "
    "'auto', got …"
)
SERVERS_MESSAGE = (
    "attention_servers must be a number of processes or 'external', or a dictionary with the "
    "member 'count', got …"
)
SETTINGS: dict[str, tuple[Any, ...]] = {
    TOKENS_MESSAGE: ("", "k", "32q", "32kB", "0.3k", "1e4", 8192.0, True, None, [8192]),
    "tokens_per_rank must be positive, got 0": (0,),
    "tokens_per_rank must be positive, got -1024": ("-1k", -1024),
    BYTES_MESSAGE: tuple(
        {"exchange_buffer_bytes": given}
        for given in ("", "128M", "128k", "MiB", "0.1KiB", 1.5, None)
    ),
    "loss_chunk_bytes must be a number of bytes, such as 134217728 or '128MiB', or 'auto', got …": (
        "128M",
        "all",
        None,
    ),
    "loss_chunk_bytes must be 0 (all logits at once) or more, got -1": (-1,),
    NODES_MESSAGE: (
        "",
        "0",
        "8,0",
        "8,",
        "-8",
        "8;8",
        "8.0",
        8.0,
        0,
        -1,
        True,
        None,
        [],
        [8, "x"],
        "all",
    ),
    SERVERS_MESSAGE: ("many", 1.0, True, None, "1k", [2], {"count": "many"}, '{"count": null}'),
    "attention_servers must be 0 (all processes train) or more, got …": (-1, "-1", {"count": -1}),
    "planning member balance_block_size must be positive, got 0": ('{"balance_block_size": 0}',),
    "planning member balance_block_size must be a whole number, got …": tuple(
        {"balance_block_size": given} for given in (128.5, "128", None, True)
    ),
    "mlp_chunk_rows must be a number or 'auto', got …": (1.5, None, "16k", "many"),
    "exchange_timeout must be a finite number, got …": ("60", None, True, inf, nan),
    "share_prefixes must be true or false, got …": ("no", "false", None, 1),
    "device_profile must be text, got …": (3, True),
    "attention_servers has no member 'adress'; the members are count, ranks_serve, address, "
    "token_file, timeout, transport": ({"count": 1, "adress": "x:1"}, '{"adress": "x:1"}'),
    "attention_servers lacks the member 'count', a number of processes or 'external'; got …": (
        {"timeout": 5},
        {},
        '{"address": "x:1"}',
    ),
    "attention_servers begins with a brace but is no JSON (…): …": ("{'count': 2}", "{"),
    "attention_servers member address must be text, got …": (
        {"count": 1, "address": None},
        {"count": 1, "address": 3},
    ),
    "attention_servers member timeout must be positive, got 0": ({"count": 1, "timeout": 0},),
    "attention_servers member ranks_serve must be true or false, got 'no'": (
        {"count": 1, "ranks_serve": "no"},
    ),
    "long_documents must be one of ['error', 'truncate', 'split'], got …": (
        "cut",
        "Truncate",
        None,
    ),
    "document_layout must be one of ['auto', 'fixed', 'whole'], got …": (
        "best",
        ["joint"],
    ),
    "attention_kernel must be one of […], got 'flash_attention_2'": ("flash_attention_2",),
    "attention_servers member transport must be one of ['auto', 'tcp', 'nixl'], got …": (
        {"count": 1, "transport": "rdma"},
        {"count": 1, "transport": None},
    ),
    'planning must be a dictionary, as JSON on a command line, such as {"ping_pong": false}, got '
    "…": (False, 128, "auto", [{"ping_pong": False}]),
    "planning begins with a brace but is no JSON (…): …": ("{'ping_pong': false}",),
    "planning has no member 'pingpong'; the members are balance_tolerance, balance_block_size, "
    "exchange_buffer_bytes, ping_pong, pod_ranks": ({"pingpong": True}, '{"pingpong": true}'),
    "planning member ping_pong must be true, false or 'auto', got …": (
        {"ping_pong": "sometimes"},
        {"ping_pong": 2},
        {"ping_pong": 2, "balance_block_size": 0},
    ),
    "planning member balance_tolerance must be 0 or more (0.05 is 5 %), or 'auto', got …": tuple(
        {"balance_tolerance": given} for given in (-0.1, "inf", None)
    ),
}


@pytest.mark.parametrize("answer", SETTINGS)
def test_settings(answer):
    for given in SETTINGS[answer]:
        assert_said(
            answer_of(
                lambda given=given: hf_distca.DistCAConfig(**{answer.split()[0]: given}), "FOLDER"
            ),
            answer,
        )


# Resuming

Damage = Callable[[Path], Any]


@pytest.fixture(scope="module")
def earlier_run(tmp_path_factory) -> Path:
    """The folder of a training of two steps, with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("earlier")
    make_trainer(str(folder), given={"train_dataset": TOKENS}, max_steps=2, save_steps=1).train()
    return folder


def resume(
    at: str | bool = "FOLDER/checkpoint-1", damage: Damage = lambda checkpoint: None
) -> Callable[[Path], None]:
    """Damage a checkpoint and resume from it."""

    def use(folder: Path) -> None:
        damage(folder / "checkpoint-1")
        train(
            folder,
            resume=at.replace("FOLDER", str(folder)) if isinstance(at, str) else at,
            max_steps=2,
        )

    return use


def halved(name: str) -> Damage:
    def halve(checkpoint: Path) -> None:
        content = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(content[: len(content) // 2])

    return halve


def without(name: str) -> Damage:
    return lambda checkpoint: (checkpoint / name).unlink()


NO_CHECKPOINT = (
    "resume_from_checkpoint={} is set, but ranks have no complete checkpoint in common, with the "
    "trainer_state.json that is written last (found: none); name a complete checkpoint such as "
    "'FOLDER/checkpoint-500', set output_dir to the folder of the earlier run, or leave "
    "resume_from_checkpoint out"
)
RESUMED: Rows = [
    (
        "a folder that is not there",
        resume("FOLDER/checkpoint-9"),
        NO_CHECKPOINT.format("FOLDER/checkpoint-9"),
    ),
    ("a folder of checkpoints", resume("FOLDER"), NO_CHECKPOINT.format("FOLDER")),
    (
        "no trainer_state.json",
        resume(damage=without("trainer_state.json")),
        NO_CHECKPOINT.format("FOLDER/checkpoint-1"),
    ),
    (
        "no complete checkpoint",
        lambda folder: (
            [without("trainer_state.json")(folder / f"checkpoint-{step}") for step in (1, 2)],
            train(folder, resume=True),
        ),
        NO_CHECKPOINT.format(True),
    ),
    (
        "no data_order.json",
        resume(damage=without("data_order.json")),
        "the checkpoint FOLDER/checkpoint-1 has no data_order.json, …",
    ),
    (
        "no optimizer",
        resume(damage=without("optimizer.pt")),
        "the checkpoint FOLDER/checkpoint-1 has no optimizer.pt or optimizer.bin or optimizer_0, …",
    ),
    (
        "no schedule",
        resume(damage=without("scheduler.pt")),
        "the checkpoint FOLDER/checkpoint-1 has no scheduler.pt, …",
    ),
]


@pytest.mark.parametrize(("use", "answer"), [pytest.param(*row[1:], id=row[0]) for row in RESUMED])
def test_resuming(use, answer, tmp_path, earlier_run):
    folder = shutil.copytree(earlier_run, tmp_path / "run")
    assert_said(answer_of(lambda: use(folder), folder), answer)


@pytest.mark.parametrize(
    "name",
    [
        *("trainer_state.json", "data_order.json", "model.safetensors", "optimizer.pt"),
        *("scheduler.pt", "rng_state.pth"),
    ],
)
def test_an_error_about_a_damaged_file_names_the_checkpoint(tmp_path, earlier_run, name):
    """The error is of the library that reads the file, which may not name it."""
    folder = shutil.copytree(earlier_run, tmp_path / "run")
    errors = (ValueError, RuntimeError, OSError, SafetensorError)
    with pytest.raises(errors, match=rf"\nThe training resumes from {folder}/checkpoint-1\.$"):
        resume(damage=halved(name))(folder)


# Warnings


def begin(use: Callable[[], None]) -> None:
    """Run what must reach the first step."""
    with pytest.raises(AssertionError, match="a step began"):
        use()


def long_document(folder: Any) -> None:
    train(
        folder,
        stored([{"input_ids": [3] * 100}, *TOKENS]),
        model=small_model(max_position_embeddings=64),
    )


BEYOND = (
    "a document has 100 tokens, but max_position_embeddings of the model is 64: it may have "
    "learned nothing about later positions. Extend them by rope_parameters in the config (such as "
    "YaRN), …"
)
WARNINGS: Rows = [
    ("a document beyond the positions of RoPE", long_document, BEYOND),
    (
        "the last checkpoint incomplete",
        lambda folder: (
            without("trainer_state.json")(folder / "checkpoint-2"),
            train(folder, resume=True, max_steps=2),
        ),
        (
            "training resumes from FOLDER/checkpoint-1, because later checkpoints are not complete "
            "on every rank: checkpoint-2"
        ),
    ),
    (
        "True on a command line",
        lambda folder: (
            without("trainer_state.json")(folder / "checkpoint-2"),
            train(folder, resume="True", max_steps=2),
        ),
        "training resumes from FOLDER/checkpoint-1, …",
    ),
    (
        "no random state",
        resume(damage=without("rng_state.pth")),
        (
            "the checkpoint FOLDER/checkpoint-1 has no rng_state.pth, so these ranks draw other "
            "random numbers, as for dropout, than without the interruption. …"
        ),
    ),
]


@pytest.mark.parametrize(("use", "answer"), [pytest.param(*row[1:], id=row[0]) for row in WARNINGS])
def test_warnings(use, answer, tmp_path, earlier_run, caplog):
    folder = shutil.copytree(earlier_run, tmp_path / "run")
    with caplog.at_level(logging.WARNING):
        begin(lambda: use(folder))
    # Besides, a training on one rank says that nothing is balanced.
    others = [record for record in caplog.records if record.name != "hf_distca.trainer.assembly"]
    (message,) = [record.getMessage() for record in others if record.name.startswith("hf_distca.")]
    assert_said(message.replace(str(folder), "FOLDER"), answer)


def test_a_document_of_a_stream_beyond_the_positions_of_rope(tmp_path, caplog):
    model = small_model(max_position_embeddings=64)
    given = {"train_dataset": Stream([{"input_ids": [3] * 100}, *TOKENS])}
    make_trainer(str(tmp_path), model=model, given=given, max_steps=2, save_strategy="no").train()
    (message,) = [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("hf_distca.dispatch")
    ]
    assert_said(message, BEYOND)


# Two ranks, of which the second one alone is given something else: both say the same

ALL_RANKS = (
    "but all ranks must train on the same micro-batches, with the same plans; start all ranks with "
    "the same "
)


def differs(name: str, first: Any, second: Any) -> str:
    return (
        f"{name} differs between ranks ({first!r} on rank 0, {second!r} on rank 1), "
        f"{ALL_RANKS}{name}"
    )


def without_mlps() -> Any:
    model = small_model()
    for layer in model.model.layers:
        layer.mlp = torch.nn.Identity()
    return model


ON_BOTH_RANKS = {"layers without MLPs": {"mlp_chunk_rows": 16}}
OF_RANK_1: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "tokens_per_rank": (lambda: {"tokens_per_rank": 96}, differs("tokens_per_rank", 160, 96)),
    "attention_kernel": (
        lambda: {"attention_kernel": "cpu"},
        differs("attention_kernel", "auto", "cpu"),
    ),
    "share_prefixes": (lambda: {"share_prefixes": False}, differs("share_prefixes", True, False)),
    "device_profile": (
        lambda: {"device_profile": "h100"},
        differs("device_profile", None, "h100"),
    ),
    "mlp_chunk_rows": (lambda: {"mlp_chunk_rows": 16}, differs("mlp_chunk_rows", "auto", 16)),
    "seed": (lambda: {"seed": 2}, differs("seed", 1, 2)),
    "layers without MLPs": (
        lambda: {"model": without_mlps()},
        "rank 1: mlp_chunk_rows=16 has no effect on …",
    ),
    "torch.compile": (
        lambda: {"torch_compile": True},
        "rank 1: torch.compile is set for the whole model …",
    ),
    "documents of its own": (
        lambda: {"rows": [{"input_ids": [3, 4, 6]}] * 4},
        (
            "ranks were given different data sets (rank 0: 4 documents, 12 tokens; rank 1: 4 "
            "documents, 12 tokens), but …"
        ),
    ),
    "a document that is wrong": (
        lambda: {"rows": [*TOKENS, {"input_ids": [3], "labels": [3, 4]}]},
        "rank 1: document 4 of train_dataset has 2 labels for 1 input_ids, …",
    ),
}


def _answers_of_ranks(folder: Path) -> list[str]:
    answers = []
    for name, (make_options, _) in OF_RANK_1.items():
        options = make_options() if dist.get_rank() == 1 else {}
        given = {"exchange_timeout": 20, **ON_BOTH_RANKS.get(name, {}), **options}
        answers.append(answer_of(partial(train, folder, **given), folder))
    return answers


def test_one_rank_is_given_something_else(rank_pools, tmp_path, subtests):
    for rank, answers in enumerate(rank_pools[2].run(_answers_of_ranks, tmp_path)):
        for said, (name, (_, answer)) in zip(answers, OF_RANK_1.items(), strict=True):
            with subtests.test(name, rank=rank):
                assert_said(said, answer)


def _resumed_with_damaged_costs(folder: Path) -> list[str]:
    """Costs, measured and corrected, are in files that a run did not write to the end."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hf_distca.profiling.costs")
    logger.addHandler(handler)
    options = {"document_layout": "auto", "balance_tolerance": "auto", "ping_pong": "auto"}
    make_trainer(str(folder), max_steps=1, save_steps=1, **options).train()
    if dist.get_rank() == 0:
        for file in (folder / "device_profile.json", folder / "checkpoint-1" / "distca_costs.json"):
            file.write_text(file.read_text()[:40])
    dist.barrier()
    make_trainer(str(folder), max_steps=2, save_strategy="no", **options).train(
        resume_from_checkpoint=True
    )
    logger.removeHandler(handler)
    return [record.replace(str(folder), "FOLDER") for record in records]


def test_costs_that_cannot_be_read_are_measured_again(rank_pools, tmp_path):
    first, second = rank_pools[2].run(_resumed_with_damaged_costs, tmp_path)
    for message, file in zip(
        first, ("device_profile.json", "checkpoint-1/distca_costs.json"), strict=True
    ):
        assert_said(
            message, f"the costs in FOLDER/{file} cannot be read and are measured again (…)"
        )
    assert second == []
