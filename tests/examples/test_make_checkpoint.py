import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the script on the first 100 documents; gives the folder of the checkpoint."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import make_checkpoint

    def run_with(*options):
        few = make_checkpoint.standard_library(progress=False).select(range(100))
        monkeypatch.setattr(make_checkpoint, "standard_library", lambda: few)
        monkeypatch.setattr(sys, "argv", ["make_checkpoint.py", "--output", str(tmp_path), *options])
        make_checkpoint.main()
        return tmp_path

    return run_with


def test_the_checkpoint_loads_like_any_other(run):
    options = "--hidden_size 64 --layers 2 --heads 4 --kv_heads 2 --vocab_size 512 --seed 3"
    checkpoint = run(*options.split())
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


def test_sizes_that_do_not_divide(run, capsys):
    with pytest.raises(SystemExit):
        run("--heads", "3")
    assert "got hidden_size 256, heads 3, kv_heads 2; expected" in capsys.readouterr().err


def test_documents_are_whole_files(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from make_checkpoint import standard_library

    texts = standard_library(progress=False)["text"][:]
    assert len(texts) > 300
    assert any("def dumps(obj, *," in text for text in texts)
    sizes = [len(text.encode()) for text in texts]
    assert min(sizes) > 50
    assert max(sizes) <= 300_000
