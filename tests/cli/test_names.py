"""Names of models, data sets and tokenizers that are not there."""

import json
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import RepositoryNotFoundError

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


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        (None, "No such file or directory"),
        ("[", "Expecting value"),
        ("[]", "config.json has no model_type"),
        ({"hidden_size": 8}, "config.json has no model_type"),
        ({"model_type": "abacus"}, "does not recognize this architecture"),
        ({"model_type": "vit"}, "for this kind of AutoModel: AutoModelForCausalLM; expected"),
    ],
    ids=["none", "no JSON", "a list", "no type", "unknown type", "no language model"],
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
