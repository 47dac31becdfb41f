import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from pathlib import Path

import datasets
import fsspec.compression
import pytest
from datasets import Dataset, DatasetDict
from datasets.load import infer_module_for_data_files_list

from hf_distca import load_documents
from hf_distca.checks.data_rules import Source
from hf_distca.collator.formats import ROWS
from tests.refused import refused


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
        for name in ("b.txt", "a.md", "inner/c.txt", ".hidden/d.txt", "README.md")
    ]
    assert load_documents(sources[:2])["text"][:] == ["b.txt\nend", "a.md\nend"]
    assert load_documents(str(tmp_path / "data"))["text"][:] == [
        "README.md\nend",
        "a.md\nend",
        "b.txt\nend",
        "inner/c.txt\nend",
    ]


def test_an_empty_text_is_a_document_and_an_empty_table_is_named(tmp_path):
    texts = [file(tmp_path, "a.txt", ""), file(tmp_path, "b.txt", "b")]
    assert load_documents(texts)["text"][:] == ["", "b"]
    for name in ("a.csv", "a.json", "a.jsonl", "a.parquet", "a.zip"):
        table = file(tmp_path, name, "")
        with refused(Source.EMPTY_FILE, path=table):
            load_documents(table)


def test_a_folder_without_files(tmp_path):
    file(tmp_path, ".hidden/a.txt", "a")
    with refused(Source.EMPTY_FOLDER, path=str(tmp_path / "data")):
        load_documents(tmp_path / "data")


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


def archive(content: bytes) -> bytes:
    """A zip archive with two files of the same rows."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as zipped:
        for name in ("a.jsonl", "b.jsonl"):
            zipped.writestr(name, content)
    return buffer.getvalue()


JSON_ROWS = b'{"text": "one"}\n{"text": "two"}\n'
TABLES = {
    "a.jsonl.gz": gzip.compress(JSON_ROWS),
    "a.json.bz2": bz2.compress(JSON_ROWS),
    "a.jsonl.xz": lzma.compress(JSON_ROWS),
    "A.JSONL": JSON_ROWS,
    "a.ndjson": JSON_ROWS,
    "a.tsv": b"text\none\ntwo\n",
    "a.csv.gz": gzip.compress(b"text\none\ntwo\n"),
    "title.txt.csv": b"text\none\ntwo\n",
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_known_by_their_suffixes_also_compressed(tmp_path, name):
    source = file(tmp_path, name, TABLES[name])
    assert load_documents(source)[:] == {"text": ["one", "two"]}
    if name.islower():  # `datasets` finds no others in a folder
        assert load_documents(tmp_path / "data")[:] == {"text": ["one", "two"]}


def test_archives_and_compressed_texts(tmp_path):
    zipped = file(tmp_path, "a.zip", archive(JSON_ROWS))
    assert load_documents(zipped)["text"][:] == ["one", "two"] * 2
    text = file(tmp_path, "a.txt.gz", gzip.compress(b"one\n\ntwo"))
    assert load_documents(text)["text"][:] == ["one\n\ntwo"]
    columns = file(tmp_path, "b.tsv", "text\tn\na,b\t1\n")
    assert load_documents(columns)[:] == {"text": ["a,b"], "n": [1]}


def test_a_compressed_file_whose_package_is_missing(tmp_path, monkeypatch):
    monkeypatch.delitem(fsspec.compression.compr, "zstd", raising=False)
    source = file(tmp_path, "a.jsonl.zst", b"\x28\xb5\x2f\xfd")
    why = "Compression type zstd not supported"
    with refused(Source.UNREADABLE, path=source, kind="json", why=why):
        load_documents(source)


NO_TEXT = [
    ("a.gz", gzip.compress(JSON_ROWS)),
    ("a.py.gz", gzip.compress(b"a = 1")),
    ("a.docx", archive(b"x")),
    ("a", gzip.compress(JSON_ROWS)),
    ("a.py", b"a = 1"),
    ("LICENSE", b"free"),
    ("a.jsonlines", JSON_ROWS),
    ("a.jsonl.1", JSON_ROWS),
]


@pytest.mark.parametrize(("name", "content"), [pytest.param(*row, id=row[0]) for row in NO_TEXT])
def test_a_file_of_an_unknown_suffix_is_refused_by_name(tmp_path, name, content):
    source = file(tmp_path, name, content)
    for given in (source, tmp_path / "data", f"{tmp_path}/data/*"):
        with refused(Source.UNKNOWN_FORMAT, path=source):
            load_documents(given)


@pytest.mark.parametrize("name", ["a.txt", "a.md", "A.TXT", "v1.json.md", "a.md.gz", "2.5.csv.txt"])
def test_text_is_known_by_the_last_suffix(tmp_path, name):
    text = '{"text": "é"}\n\n\x02end'
    content = text.encode()
    source = file(tmp_path, name, gzip.compress(content) if name.endswith(".gz") else content)
    for given in (source, tmp_path / "data"):
        assert load_documents(given)[:] == {"text": [text]}


def test_other_loaders_of_datasets_are_taken_too(tmp_path):
    rows = io.BytesIO()
    with tarfile.open(fileobj=rows, mode="w") as tar:
        for name in ("0.txt", "1.txt"):
            member = tarfile.TarInfo(name)
            member.size = len(name)
            tar.addfile(member, io.BytesIO(name.encode()))
    assert load_documents(file(tmp_path, "a.tar", rows.getvalue()))["txt"][:] == ["0.txt", "1.txt"]


def test_json_in_a_text_file_is_text(tmp_path):
    assert load_documents(file(tmp_path, "a.txt", JSON_ROWS))["text"][:] == [JSON_ROWS.decode()]


def test_patterns_stand_for_files_in_the_order_of_their_names(tmp_path):
    for name in ("b.md", "a.md", "c.txt", "inner/d.md", "e[1].md", "README.md"):
        file(tmp_path, name, name)
    folder = f"{tmp_path}/data"
    assert load_documents(f"{folder}/*.md")["text"][:] == [
        *("README.md", "a.md", "b.md", "e[1].md")
    ]
    assert load_documents([f"{folder}/**/[cd]*", f"{folder}/e[1].md"])["text"][:] == [
        *("c.txt", "inner/d.md"),
        "e[1].md",
    ]
    with refused(Source.NO_MATCH, pattern=f"{folder}/*.rst"):
        load_documents(f"{folder}/*.rst")
    with refused(Source.NO_MATCH, pattern="nosuch/*"):  # which is no name on the Hub
        load_documents("nosuch/*")


def test_brackets_in_the_path_of_a_folder(tmp_path, monkeypatch):
    for folder in ("d[1]", "d1"):
        for name in ("a.txt", "rows/a.jsonl"):
            file(tmp_path, f"{folder}/{name}", f'{{"text": "{folder}"}}\n')
    monkeypatch.chdir(tmp_path / "data" / "d[1]")
    assert load_documents("a.txt")["text"][:] == ['{"text": "d[1]"}\n']
    with refused(Source.WILDCARDS, path="rows"):  # `datasets` would read the other folder
        load_documents("rows")
    assert load_documents("rows/a.jsonl")["text"][:] == ["d[1]"]


def test_names_tell_rows_as_datasets_does():
    for suffix in ROWS:
        assert infer_module_for_data_files_list([f"a{suffix}"])[0] in {
            *("arrow", "csv", "json", "parquet")
        }


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
    assert load_documents([table, text, table])["text"][:] == ["two", "one", "two"]
    wide = [
        file(tmp_path, "d.jsonl", '{"text": "x", "n": 1}\n'),
        file(tmp_path, "e.csv", "n,text\n2,y\n"),
    ]
    assert load_documents(wide)[:] == {"text": ["x", "y"], "n": [1, 2]}
    with pytest.raises(
        ValueError,
        match=r"c\.jsonl' has the columns body \(string\), but '.*a\.txt' has the columns text \(",
    ):
        load_documents([text, other])
    with refused(Source.OTHER_COLUMNS, path=text, first="n (int64)"):
        load_documents([file(tmp_path, "f.jsonl", '{"n": 1}\n'), text])
    words = file(tmp_path, "g.jsonl", '{"text": "x", "n": "one"}\n')
    with refused(
        Source.OTHER_COLUMNS, path=words, columns="text (string), n (string)", first_path=wide[0]
    ):
        load_documents([wide[0], words])


UNREADABLE = [
    (
        "bad.txt",
        b"a\xffb",
        r"bad\.txt cannot be read as text: it has the bytes b'a\\xffb', but .*iconv",
    ),
    (
        "bad.csv",
        b"text\na\xffb\n",
        r"bad\.csv cannot be read as csv: it has the bytes b'a\\xffb', but .*iconv",
    ),
    (
        "bad.jsonl",
        '{"text": "x"}\n{"text": \n',
        r"bad\.jsonl cannot be read as json: JSON parse error[^;]*; repair .* leave it out$",
    ),
    (
        "bad.jsonl.gz",
        gzip.compress(b'{"text": "x"}\n')[:-4],
        r"bad\.jsonl\.gz cannot be read as json: Compressed file ended",
    ),
    ("bad.zip", "no archive", r"bad\.zip cannot be read as zip: File is not a zip file"),
    (
        "commas.csv",
        "text\nhello, world\n",
        r"commas\.csv cannot be read as csv: rows have more fields than the first line; does",
    ),
    ("bad.parquet", "no table", r"bad\.parquet cannot be read as parquet: "),
    ("utf-16.txt", "a".encode("utf-16"), r"utf-16\.txt cannot be read as text: it has the bytes"),
    (
        "no-mark.md",
        "a".encode("utf-16-le"),
        r"no-mark\.md cannot be read as text: it has the bytes",
    ),
]


@pytest.mark.parametrize(
    ("name", "content", "message"), [pytest.param(*row, id=row[0]) for row in UNREADABLE]
)
def test_an_unreadable_file_is_named_among_others(tmp_path, name, content, message):
    good = {".csv": "text\nx\n", ".txt": "x", ".jsonl": '{"text": "x"}\n'}
    suffix = Path(name).suffix
    sources = [file(tmp_path, name, content)]
    if suffix in good:
        sources.insert(0, file(tmp_path, f"good{suffix}", good[suffix]))
    with pytest.raises(ValueError, match=message):
        load_documents(sources)


def test_an_unreadable_table_of_a_folder_is_named(tmp_path):
    file(tmp_path, "a.jsonl", '{"text": "x"}\n')
    file(tmp_path, "bad.jsonl", '{"text": "x"}\n{"text": \n')
    with pytest.raises(ValueError, match=r"/bad\.jsonl cannot be read as json: "):
        load_documents(str(tmp_path / "data"))


def test_a_folder_without_the_split_is_a_folder(tmp_path):
    file(tmp_path, "good.csv", "text\nx\n")
    folder = str(tmp_path / "data")
    with refused(Source.FOLDER_NOT_LOADED, path=folder) as error:
        load_documents(folder, split="validation")
    assert 'Unknown split "validation"' in str(error.value)
    file(tmp_path, "other.csv", "body\nx\n")
    with refused(Source.FOLDER_NOT_LOADED, path=folder) as error:
        load_documents(folder)
    assert "body: large_string" in str(error.value)


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
        ("{tmp_path}/empty", "the folder '.*empty' has no files, or only hidden ones"),
    ],
)
def test_sources_that_do_not_exist(tmp_path, source, message):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=message):
        load_documents(source.format(tmp_path=tmp_path))


def test_no_source():
    with pytest.raises(ValueError, match="no source is named"):
        load_documents([])


@pytest.mark.parametrize(("name", "content"), [("a.csv", "text\n"), ("a.json", "[]")])
def test_a_file_without_rows(tmp_path, name, content):
    source = file(tmp_path, name, content)
    with refused(Source.UNREADABLE, path=source) as error:
        load_documents(source)
    assert "corresponds to no data" in str(error.value)


def test_lines_are_no_documents(tmp_path):
    with refused(Source.NO_WAY_TO_DIVIDE, given="line"):
        load_documents(file(tmp_path, "a.txt", "one\n"), sample_by="line")  # type: ignore[arg-type]  # refused


def test_an_error_of_the_disk_is_raised_as_it_is(tmp_path, monkeypatch):
    def fail(*_args, **_options):
        raise datasets.exceptions.DatasetGenerationError from OSError(28, "No space left", "/cache")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(datasets.exceptions.DatasetGenerationError):
        load_documents(file(tmp_path, "a.jsonl", '{"text": "x"}\n'))
