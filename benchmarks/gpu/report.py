"""What was found, as JSON for programs and as a table for people."""

import json
from pathlib import Path
from typing import Any

from benchmarks.harness import table

PASSED, FAILED, TIMED_OUT, SKIPPED, NOT_REACHED = "passed", "FAILED", "TIMED OUT", "skipped", "NOT REACHED"
GOOD = (PASSED, SKIPPED)


def write(path: Path, results: dict[str, Any]) -> None:
    """Write results, never half of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(results, indent=2) + "\n")
    draft.replace(path)


def print_table(results: dict[str, Any]) -> None:
    """Print one line a part, then everything that is wrong."""
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
        if part["skipped"]:
            print(f"{name}: skipped: {part['skipped']}")
