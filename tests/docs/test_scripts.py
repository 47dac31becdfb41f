"""The scripts of the page "From your script": few lines change, and they train in one launch."""

import re
from pathlib import Path
from typing import Any

import datasets
import pytest

from tests.models_and_batches import small_model
from tests.trainer.chats import chats, prompts, tokenizer
from tests.trainer.preferences import preferences

PAGE = Path(__file__).parents[2] / "docs" / "start" / "from-your-script.md"
SCRIPTS = dict(re.findall(r"^## (\S+ \S+)\n\n```diff\n(.*?)^```$", PAGE.read_text(), re.M | re.S))
NAME, FOLDER = '"Qwen/Qwen3-0.6B"', re.compile(r'output_dir="runs/\w+"')
TEXTS = datasets.Dataset.from_dict({"text": ["w1 w2 w3", "w4 w5", "w6 w7 w8 w9"]})
DATA: dict[str, datasets.Dataset] = {
    "roneneldan/TinyStories": TEXTS,
    "trl-lib/Capybara": chats(),
    "trl-lib/ultrafeedback_binarized": preferences(4),
    "trl-lib/tldr": prompts(2).select_columns("prompt"),
}


def side(diff: str, sign: str) -> list[str]:
    """The lines of a script before (-) or after (+) a change."""
    return [line[1:] for line in diff.splitlines() if not line or line[0] in (" ", sign)]


def test_the_page_has_four_scripts():
    assert list(SCRIPTS) == [
        "transformers' Trainer",
        "TRL's SFTTrainer",
        "TRL's DPOTrainer",
        "TRL's GRPOTrainer",
    ]


@pytest.mark.parametrize("script", SCRIPTS)
def test_names_alone_change(script):
    before = [line for line in SCRIPTS[script].splitlines() if line.startswith("-")]
    after = [line for line in SCRIPTS[script].splitlines() if line.startswith("+")]
    assert len(before) == len(after) == 3
    # In the calls nothing but the class.
    for old, new in zip(before[1:], after[1:], strict=True):
        assert old[1:] == re.sub(r"DistCA(?=[A-Z]\w+\()", "", new[1:])


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of TRL itself
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_trains_at_once(
    script: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    model: Any = small_model()
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    source = "\n".join(side(SCRIPTS[script], "+")).replace(NAME, repr(str(tmp_path / "model")))
    few = f'output_dir={str(tmp_path / "out")!r}, max_steps=1, report_to="none"'
    source, count = FOLDER.subn(few, source)
    assert count == 1
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: DATA[name])
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, f"script of {PAGE.name}", "exec"), scope)
    assert scope["trainer"].state.global_step == 1
    quoted = re.findall(r"^> (.*)$", PAGE.read_text(), re.M)
    printed = capsys.readouterr().out
    assert any(line in printed for line in quoted) == (script == "transformers' Trainer")
