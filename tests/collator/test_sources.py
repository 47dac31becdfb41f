import json
import logging
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict
from datasets.utils.logging import get_verbosity

from hf_distca import load_documents


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


def file(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / "data" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def test_a_text_file_is_one_document_or_its_paragraphs(tmp_path):
    source = file(tmp_path, "a.txt", "one\ntwo\n\nthree\n")
    assert load_documents(source)[:] == {"text": ["one\ntwo\n\nthree\n"]}
    assert load_documents(source, sample_by="paragraph")[:] == {"text": ["one\ntwo", "three\n"]}


def test_several_text_files_and_a_folder_of_them_are_a_document_each(tmp_path):
    sources = [
        file(tmp_path, name, f"{name}\nend")
        for name in ("b.txt", "a.py", "inner/c", ".hidden/d.txt")
    ]
    assert load_documents(sources[:2])["text"][:] == ["b.txt\nend", "a.py\nend"]
    assert load_documents(str(tmp_path / "data"))["text"][:] == [
        "a.py\nend",
        "b.txt\nend",
        "inner/c\nend",
    ]


def test_a_folder_of_sources(tmp_path, caplog, monkeypatch):
    """`datasets` leaves out special folders too; an empty file has no token to train on."""
    for name in ("a.py", "inner/__main__.py"):
        file(tmp_path, name, f"{name}\nend")
    file(tmp_path, "__pycache__/a.pyc", b"\xff")
    file(tmp_path, "inner/__init__.py", "")
    folder = str(tmp_path / "data")
    assert load_documents(folder)["text"][:] == ["a.py\nend", "inner/__main__.py\nend"]
    assert caplog.messages == [f"empty files of the folder {folder!r}, which are left out: 1"]
    monkeypatch.setenv("RANK", "1")
    caplog.clear()
    load_documents(folder)
    assert caplog.messages == []
    (tmp_path / "data" / "inner" / "__main__.py").unlink()
    with pytest.raises(ValueError, match="has no files, or only empty ones"):
        load_documents(str(tmp_path / "data" / "inner"))
    with pytest.raises(ValueError, match=r"inner/__init__\.py' is empty"):
        load_documents(str(tmp_path / "data" / "inner" / "__init__.py"))


def test_tables_keep_their_columns_whatever_their_format(tmp_path):
    rows = {"messages": [[{"role": "user", "content": "hi"}]], "id": [7]}
    chats = "".join(
        json.dumps({name: values[0] for name, values in rows.items()}) + "\n" for _ in range(2)
    )
    assert (
        load_documents(file(tmp_path, "chats.jsonl", chats))["messages"][:] == rows["messages"] * 2
    )
    assert load_documents(file(tmp_path, "a.csv", "text,n\nx,1\n"))[:] == {"text": ["x"], "n": [1]}
    tokens = Dataset.from_dict({"input_ids": [[1, 2], [3]]})
    tokens.to_parquet(tmp_path / "a.parquet")
    assert load_documents(str(tmp_path / "a.parquet"))[:] == {"input_ids": [[1, 2], [3]]}


def test_folders_with_tables_and_saved_data_sets(tmp_path):
    file(tmp_path, "train.jsonl", '{"text": "x"}\n')
    file(tmp_path, "test.jsonl", '{"text": "y"}\n')
    file(tmp_path, "README.md", "about")
    assert load_documents(str(tmp_path / "data"))["text"][:] == ["x"]
    assert load_documents(str(tmp_path / "data"), split="test")["text"][:] == ["y"]
    saved = Dataset.from_dict({"text": ["z"]})
    saved.save_to_disk(tmp_path / "saved")
    DatasetDict(train=saved).save_to_disk(tmp_path / "dict")
    assert load_documents([str(tmp_path / "saved"), str(tmp_path / "dict")])["text"][:] == [
        "z",
        "z",
    ]
    with pytest.raises(
        ValueError, match=r"dict' has the splits \['train'\], but the split 'test' was asked for"
    ):
        load_documents(str(tmp_path / "dict"), split="test")


def test_a_folder_with_texts_and_tables_is_refused_since_datasets_reads_texts_line_by_line(
    tmp_path,
):
    for name in ("LICENSE.txt", "a.txt", "b.txt", "about.json"):
        file(tmp_path, name, '{"text": "x"}\n')
    with pytest.raises(
        ValueError,
        match=r"data' has text files such as 'a.txt' and tables such as 'about.json', but",
    ):
        load_documents(str(tmp_path / "data"))
    for name in ("a.txt", "b.txt"):
        (tmp_path / "data" / name).unlink()
    assert load_documents(str(tmp_path / "data"))["text"][:] == ["x"]


def test_sources_of_different_formats_with_the_same_columns_are_joined_in_order(tmp_path):
    text = file(tmp_path, "a.txt", "one")
    table = file(tmp_path, "b.jsonl", '{"text": "two"}\n')
    other = file(tmp_path, "c.jsonl", '{"body": "three"}\n')
    assert load_documents([table, text])["text"][:] == ["two", "one"]
    with pytest.raises(
        ValueError, match=r"c\.jsonl' has the columns \['body'\], but '.*a\.txt' has the columns"
    ):
        load_documents([text, other])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "bad.txt",
            b"a\xffb",
            r"bad\.txt cannot be read as text: byte 1 is 0xff, which is not UTF-8, but .*iconv",
        ),
        (
            "bad.jsonl",
            '{"text": "x"}\n{"text": \n',
            r"bad\.jsonl cannot be read as json: JSON parse error",
        ),
        ("bad.parquet", "no table", r"bad\.parquet cannot be read as parquet: "),
        ("empty.txt", "", r"empty\.txt' is empty"),
    ],
)
def test_an_unreadable_file_is_named_among_others(tmp_path, name, content, message):
    good = Path(name).with_stem("good")
    sources = [file(tmp_path, name, content)]
    if good.suffix != ".parquet":
        sources.insert(0, file(tmp_path, str(good), '{"text": "x"}\n'))
    with pytest.raises(ValueError, match=message):
        load_documents(sources)


TRUNCATED = {
    "bad.jsonl": b'{"text": "x"}\n{"text": \n',
    "bad.csv": b'text,more\nx,y,z\n"',
    "bad.parquet": b"no table",
}


@pytest.fixture
def logged(caplog):
    """Records of `datasets`, which does not hand them on to the root logger."""
    logger = logging.getLogger("datasets")
    logger.addHandler(caplog.handler)
    yield caplog.records
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize("name", TRUNCATED)
def test_parsers_log_nothing_beside_the_error(tmp_path, logged, name):
    with pytest.raises(ValueError, match="cannot be read as"):
        load_documents(file(tmp_path, name, TRUNCATED[name]))
    assert logged == []
    logger = logging.getLogger("datasets.packaged_modules.json.json")
    assert logger.getEffectiveLevel() == get_verbosity()


def test_an_unreadable_table_of_a_folder_is_named(tmp_path):
    file(tmp_path, "a.jsonl", '{"text": "x"}\n')
    file(tmp_path, "bad.jsonl", TRUNCATED["bad.jsonl"])
    with pytest.raises(ValueError, match=r"/bad\.jsonl cannot be read as json: "):
        load_documents(str(tmp_path / "data"))


def test_a_folder_without_the_split_is_a_folder(tmp_path):
    file(tmp_path, "good.csv", "text\nx\n")
    with pytest.raises(ValueError, match="is a folder and cannot be loaded by `datasets`"):
        load_documents(str(tmp_path / "data"), split="validation")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nosuch.txt", "there is no file or folder 'nosuch.txt'"),
        ("./nosuch", "there is no file or folder './nosuch'"),
        ("{tmp_path}/nosuch", "there is no file or folder '.*nosuch'"),
        (
            "someone/nosuch",
            "'someone/nosuch' is no file here and cannot be loaded by `datasets`",
        ),
        ("{tmp_path}/empty", "the folder '.*empty' has no files, or only empty ones"),
    ],
)
def test_sources_that_do_not_exist(tmp_path, source, message):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=message):
        load_documents(source.format(tmp_path=tmp_path))


def test_no_source():
    with pytest.raises(ValueError, match="no source is named"):
        load_documents([])
