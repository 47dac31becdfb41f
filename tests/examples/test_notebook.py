"""The notebook, its cells run one after another in one process, as a kernel runs them."""

import json
import re
from pathlib import Path

from tests.examples.running import EXAMPLES, run
from tests.ranks import free_port

NOTEBOOK = EXAMPLES / "notebook.ipynb"


def code() -> str:
    """The cells of code, one after another."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def test_it_trains_on_two_processes(tmp_path):
    # On a port of its own: another launch may have the launcher's.
    launched = "notebook_launcher(train, num_processes=2"
    assert code().count(launched) == 1
    Path(tmp_path, "cells.py").write_text(code().replace(launched, f'{launched}, use_port="{free_port()}"'))
    printed = run(["cells.py"], tmp_path)
    assert "Launching training on 2 " in printed
    losses = [float(found) for found in re.findall(r"'loss': '?([\d.]+)", printed)]
    assert losses[-1] < losses[0] - 1
    packed, planned = (
        max(float(found) for found in re.findall(rf"'distca/{name}': '?([\d.]+)", printed))
        for name in ("imbalance_degree_packed", "imbalance_degree")
    )
    assert planned < 1.05 < packed
    assert "    return 1" in printed.splitlines()


def test_it_is_stored_without_outputs():
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
