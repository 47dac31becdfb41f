"""The command itself: its help and its version, which must not wait for torch or transformers."""

import subprocess
import sys

import pytest

import hf_distca
from hf_distca.cli.main import TOOLS, main

HEAVY = {"torch", "transformers", "numpy"}


def test_help_and_version_import_nothing_heavy():
    code = f"""
import contextlib, sys
from hf_distca.cli.main import main
for arguments in ([], ["--help"], ["--version"]):
    with contextlib.suppress(SystemExit):
        main(arguments)
print("heavy:", *sorted({HEAVY!r} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy:"


def test_alone_it_shows_its_help(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: hf-distca")
    for tool, what_for in TOOLS.items():
        assert tool in shown
        assert what_for.split(",")[0] in shown


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"hf-distca {hf_distca.__version__}\n"


def test_an_unknown_tool_is_an_error_in_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plam"])
    assert ended.value.code == 2
    assert "invalid choice: 'plam'" in capsys.readouterr().err
