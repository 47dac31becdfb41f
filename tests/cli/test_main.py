"""The command itself: its help and its version, which must not wait for torch or transformers."""

import subprocess
import sys

import hf_distca
from hf_distca.cli.main import TOOLS

CODE = """
import contextlib, sys
from hf_distca.cli.main import main
for arguments in ([], ["--help"], ["--version"]):
    with contextlib.suppress(SystemExit):
        main(arguments)
print("heavy:", *sorted({"torch", "transformers", "numpy"} & set(sys.modules)))
"""


def test_help_and_version_import_nothing_heavy(run):
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    *_, version, heavy = done.stdout.splitlines()
    assert (version, heavy) == (f"hf-distca {hf_distca.__version__}", "heavy:")
    status, shown, _ = run()
    assert (status, shown.startswith("usage: hf-distca")) == (0, True)
    assert all(tool in shown and what_for.split(",")[0] in shown for tool, what_for in TOOLS.items())
    status, _, error = run("plam")
    assert (status, error.count("\n"), "invalid choice: 'plam'" in error) == (2, 1, True)
