"""What was found, as JSON for programs and as a table for people."""

import json
import shlex
from pathlib import Path
from typing import Any

from benchmarks.harness import table

PASSED, FAILED, TIMED_OUT, SKIPPED, NOT_RUN = "passed", "FAILED", "TIMED OUT", "skipped", "NOT RUN"
NOT_DONE = "NOT DONE"
"""Of a part that runs, and so of the one in which all was killed."""
GOOD = (PASSED, SKIPPED)


def write(path: Path, results: dict[str, Any]) -> None:
    """Write results, never half of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(results, indent=2) + "\n")
    draft.replace(path)


def print_table(results: dict[str, Any]) -> None:
    """Print one line a part, then everything that is wrong, and the command for the parts that were not run."""
    parts = results["parts"]
    table(
        ["part", "result", "seconds", "wrong"],
        [
            [name, part["status"], f"{part['seconds']:.0f}", str(len(part["wrong"])) if part["wrong"] else ""]
            for name, part in parts.items()
        ],
    )
    for name, part in parts.items():
        for sentence in part["wrong"]:
            print(f"{name}: {sentence}")
        if part["printed"]:
            print(part["printed"])
        if part["skipped"]:
            print(f"{name}: skipped: {part['skipped']}")
    if left := [name for name, part in parts.items() if part["status"] == NOT_RUN]:
        print(f'not run: make gpu GPU="{shlex.join(left)}"')
