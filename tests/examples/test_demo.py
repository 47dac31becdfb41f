"""The comparison with plain DDP, and the notebook, with small settings."""

import json
import re
import sys

import pytest

from examples.demo import full_steps, imbalance, packed_in_order
from hf_distca.cli.main import main
from tests.examples.running import EXAMPLES, run, run_forked
from tests.launch import ROOT
from tests.ranks import free_port

pytestmark = pytest.mark.launches


def test_both_trainings_have_the_same_losses_and_a_step_is_drawn(checkpoint, tmp_path):
    options = ["--tokens_per_rank", "2048", "--steps", "6"]
    command = [
        "demo.py",
        "--model_name_or_path",
        str(checkpoint),
        "--output_dir",
        str(tmp_path),
        *options,
    ]
    printed = run_forked(command, tmp_path / "printed", DS_ACCELERATOR="cpu")
    matches = re.findall(r"^(\w[\w ,]*?)  +([\d.]+\D*?)  +([\d.]+\D*)$", printed, re.M)
    rows = {name: values for name, *values in matches}
    page = (ROOT / "docs" / "start" / "quickstart.md").read_text()
    assert set(rows) == set(re.findall(r"^((?:step|idle|imbalance|loss)\b.*?)  +", page, re.M))
    assert len(rows) == 5
    assert rows["loss, first step"][0] == rows["loss, first step"][1]
    plain, planned = map(float, rows["imbalance of attention"])
    assert 1 <= planned < plain
    assert float(re.search(r"losses differ by ([\de.-]+) at most", printed)[1]) < 1e-4
    shares = re.findall(r"^(\d+) of 12 steps, \d+ s$", printed, re.M)
    assert shares == ["3", "6", "9", "12"]  # of both trainings, printed by one process
    assert len(re.findall(r"rank \d  █+·*$", printed, re.M)) == 4
    noise = ("WARNING", "Warning", "it/s", "find_unused_parameters")
    assert [words for words in noise if words in printed] == []
    assert main(["timeline", str(tmp_path)]) == 0


def test_steps_are_full():
    steps = full_steps([[1] * 5, [2] * 2, [3] * 4, [4] * 3, [5] * 9], 8, 2)
    assert steps == [[[1] * 5, [2] * 2, [3]], [[4] * 3, [5] * 5]]
    parts = packed_in_order(steps[0], 2)
    assert parts == [[[1] * 5], [[2] * 2, [3]]]
    assert imbalance(parts) == 15 / (19 / 2)


def test_the_commands_to_try_next_are_there():
    makefile = (ROOT / "Makefile").read_text().replace("$(CHECKPOINT)", "runs/checkpoint")
    shown = re.findall(r'echo "  (.*)"', makefile.split("\ndemo:")[1].split("\n\n")[0])
    assert len(shown) == 3
    named = re.findall(r"examples/[\w/.]+|README.md", "\n".join(shown))
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_notebook_trains_on_two_processes(tmp_path):
    """Its cells run one after another in one process, as a kernel runs them; it is stored without
    outputs.
    """
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    assert not [
        cell for cell in cells if cell.get("outputs") or cell.get("execution_count") is not None
    ]
    code = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    # On a free port: another launch may listen on the default port of accelerate.
    launched = "notebook_launcher(train, num_processes=2"
    assert code.count(launched) == 1
    (tmp_path / "cells.py").write_text(
        code.replace(launched, f'{launched}, use_port="{free_port()}"')
    )
    printed = run([sys.executable, "cells.py"], tmp_path)
    assert "Launching training on 2 " in printed
    losses = [float(number) for number in re.findall(r"'loss': '?([\d.]+)", printed)]
    assert losses[-1] < losses[0] - 1
    shown = re.findall(r"'imbalance': '([\d.]+) -> ([\d.]+)'", printed)
    packed, planned = (max(map(float, figures)) for figures in zip(*shown, strict=True))
    assert planned < 1.05 < packed
    assert "    return 1" in printed.splitlines()
