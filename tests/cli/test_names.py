"""Names of models, data sets and tokenizers that are not there."""

import json
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import RepositoryNotFoundError
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from hf_distca.cli.names import AUTO_CLASSES, causal_types
from hf_distca.pool.token import make_token, write_token

STEP = ("--ranks", "2", "--tokens-per-rank", "64")
NO_MODEL = "the Hub has no such model, or it is private and needs hf auth login"
NO_DATA_SET = "the Hub has no such data set, or it is private and needs hf auth login"


@pytest.fixture
def asked(monkeypatch):
    """Names for which the Hub was asked; it has none of them."""
    names = []

    def repo_info(_self, name, **_options):
        names.append(name)
        response = SimpleNamespace(headers={}, request=None, status_code=404)
        raise RepositoryNotFoundError("404 Client Error", response=response)

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", repo_info)
    return names


@pytest.mark.parametrize("tool", ["plan", "simulate"])
@pytest.mark.parametrize(
    ("options", "answer"),
    [
        (("--lengths", "prolong", "--model", "no/model"), f"at 'no/model': {NO_MODEL}; expected"),
        (("--lengths", "no/data"), f"no document lengths at 'no/data': {NO_DATA_SET}. Or give"),
        (
            ("--lengths", "text.txt", "--tokenizer", "no/model"),
            f"no tokenizer at 'no/model': {NO_MODEL}",
        ),
    ],
    ids=["model", "data set", "tokenizer"],
)
def test_names_that_the_hub_does_not_have(run, asked, monkeypatch, tmp_path, tool, options, answer):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a b")
    status, _, error = run(tool, *options, *STEP)
    assert status == 2
    assert answer in error
    assert error.count("\n") == 1
    assert len(asked) == 1


@pytest.mark.usefixtures("without_memory")
def test_a_model_in_the_cache_is_not_looked_up(run, asked, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--an--other").mkdir()
    status, _, error = run("simulate", "--lengths", "prolong", "--model", "an/other", *STEP)
    assert asked == []
    assert status == 2
    assert "no model config at 'an/other': " in error


def test_causal_types_are_those_of_transformers():
    package = distribution("transformers")
    types = causal_types(Path(str(package.locate_file(AUTO_CLASSES))))
    assert types == {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}


@pytest.mark.parametrize("source", [None, "MODELS = {}"], ids=["no file", "another table"])
def test_no_causal_types_in_another_version_of_transformers(tmp_path, source):
    if source is not None:
        (tmp_path / "modeling_auto.py").write_text(source)
    assert causal_types(tmp_path / "modeling_auto.py") == set()


def test_the_config_of_a_model_in_the_cache_is_read(run, asked, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--an--encoder/snapshots/0a1b"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "vit"}')
    (tmp_path / "models--an--encoder/refs").mkdir()
    (tmp_path / "models--an--encoder/refs/main").write_text("0a1b")
    status, _, error = run("simulate", "--lengths", "prolong", "--model", "an/encoder", *STEP)
    assert asked == []
    assert status == 2
    assert "no model config at 'an/encoder': transformers " in error
    assert "has no causal language model of the type 'vit'" in error


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        (None, "No such file or directory"),
        ("[", "Expecting value"),
        ("[]", "config.json has no model_type"),
        ({"hidden_size": 8}, "config.json has no model_type"),
        ({"model_type": ["llama"]}, "config.json has no model_type"),
        ({"model_type": "abacus"}, "has no causal language model of the type 'abacus'; expected"),
        ({"model_type": "vit"}, "has no causal language model of the type 'vit'; expected"),
        ({"model_type": "t5"}, "has no causal language model of the type 't5'; expected"),
    ],
    ids=["none", "no JSON", "a list", "no type", "types", "unknown type", "images", "encoder"],
)
def test_folders_without_the_config_of_a_language_model(run, tmp_path, content, answer):
    if content is not None:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "config.json").write_text(text)
    options = ("--lengths", "prolong", "--model", str(tmp_path))
    status, _, error = run("simulate", *options, *STEP)
    assert status == 2
    assert f"no model config at '{tmp_path}': " in error
    assert answer in error
    assert error.count("\n") == 1


def test_the_transport_of_a_server_needs_its_package(run, monkeypatch, tmp_path):
    write_token(tmp_path / "token", make_token())
    monkeypatch.setattr("hf_distca.pool.nixl.find_spec", lambda _name: None)
    token = ("--token-file", str(tmp_path / "token"))
    status, _, error = run("serve", "--join", "a:1", *token, "--transport", "nixl")
    assert status == 2
    assert "--transport nixl cannot be used: NIXL is not installed; install" in error
    assert error.count("\n") == 1


def test_a_model_without_a_tokenizer_is_one_line(run, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "text.txt").write_text("a b")
    options = ("--lengths", str(tmp_path / "text.txt"), "--tokenizer", str(tmp_path))
    status, _, error = run("plan", *options, *STEP)
    assert status == 2
    assert f"error: --tokenizer {tmp_path} cannot make tokens of the column 'text': " in error
    assert error.count("\n") == 1
