"""The comparison with plain DDP, with small settings."""

import re

import pytest

from hf_distca.cli.main import main
from tests.examples.running import EXAMPLES, run_forked
from tests.launch import ROOT


@pytest.fixture(scope="module")
def printed(checkpoint, tmp_path_factory) -> tuple[str, str]:
    """Output of the demo, and its folder."""
    folder = tmp_path_factory.mktemp("demo")
    options = ["--tokens_per_rank", "512", "--steps", "6"]
    command = ["demo.py", "--model_name_or_path", str(checkpoint), "--output_dir", str(folder), *options]
    return run_forked(command, folder / "printed", DS_ACCELERATOR="cpu"), str(folder)


def test_both_trainings_have_the_same_losses(printed):
    rows = {
        name: values for name, *values in re.findall(r"^(\w[\w ,]*?)  +([\d.]+\D*?)  +([\d.]+\D*)$", printed[0], re.M)
    }
    assert set(rows) == {
        "step time, median",
        "idle share",
        "imbalance of attention",
        "loss, first step",
        "loss, last step",
    }
    assert rows["loss, first step"][0] == rows["loss, first step"][1]
    plain, planned = (float(value) for value in rows["imbalance of attention"])
    assert 1 <= planned < plain
    apart = re.search(r"losses differ by ([\de.-]+) at most", printed[0])[1]
    assert float(apart) < 1e-4
    assert len(re.findall(r"rank \d  █+·*$", printed[0], re.M)) == 4
    for noise in ("WARNING", "Warning", "it/s", "find_unused_parameters"):
        assert noise not in printed[0]


def test_a_step_is_drawn(printed, capsys, tmp_path):
    picture = tmp_path / "step.svg"
    assert main(["timeline", printed[1], "--svg", str(picture)]) == 0
    assert "rank 1" in capsys.readouterr().out
    assert picture.read_text().startswith("<svg")


def test_steps_are_full(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from demo import full_steps, imbalance, packed_in_order

    steps = full_steps([[1] * 5, [2] * 2, [3] * 4, [4] * 3, [5] * 9], 8, 2)
    assert steps == [[[1] * 5, [2] * 2, [3]], [[4] * 3, [5] * 5]]
    parts = packed_in_order(steps[0], 2)
    assert parts == [[[1] * 5], [[2] * 2, [3]]]
    assert imbalance(parts) == 15 / (19 / 2)


def test_the_commands_to_try_next_are_there():
    makefile = (ROOT / "Makefile").read_text().replace("$(BIN)/", "").replace("$(CHECKPOINT)", "runs/checkpoint")
    demo = makefile.split("\ndemo:")[1].split("\n\n")[0]
    shown = re.findall(r'echo "  (.*)"', demo)
    assert len(shown) == 3
    for command in shown:
        for path in re.findall(r"examples/[\w/.]+|LICENSE", command):
            assert (ROOT / path).exists()
