import sys

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.examples.running import EXAMPLES


@pytest.fixture
def make_checkpoint(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import make_checkpoint

    return make_checkpoint


def test_the_checkpoint_loads_like_any_other(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert model.config.model_type == "llama"
    assert (model.config.hidden_size, model.config.num_hidden_layers) == (64, 2)
    assert (model.config.num_attention_heads, model.config.num_key_value_heads) == (4, 2)
    assert model.config.vocab_size == len(tokenizer) == 512
    inputs = tokenizer("def main():", return_tensors="pt")
    assert model.generate(**inputs, max_new_tokens=3).shape[1] <= inputs["input_ids"].shape[1] + 3
    text = (EXAMPLES / "make_checkpoint.py").read_text(encoding="utf-8") + "\t ünïcödé ✓\n\n"
    tokens = tokenizer(text)["input_ids"]
    assert tokens[0] == tokenizer.bos_token_id
    assert tokenizer.decode(tokens[1:]) == text
    assert len(tokens) < len(text.encode()) / 1.5


def test_sizes_that_do_not_divide(make_checkpoint, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["make_checkpoint.py", "--output", str(tmp_path), "--heads", "3"])
    with pytest.raises(SystemExit):
        make_checkpoint.main()
    assert "got hidden_size 256, heads 3, kv_heads 2; expected" in capsys.readouterr().err


def test_documents_are_whole_files(make_checkpoint):
    texts = make_checkpoint.standard_library(progress=False)["text"][:]
    assert len(texts) > 300
    assert any("def dumps(obj, *," in text for text in texts)
    sizes = [len(text.encode()) for text in texts]
    assert min(sizes) > 50
    assert max(sizes) <= 300_000
