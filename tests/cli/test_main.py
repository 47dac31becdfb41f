"""The command itself: its help and its version, which must not wait for torch or transformers."""

import subprocess
import sys

import pytest

import hf_distca
from hf_distca.cli.main import TOOLS, main

HEAVY = {"torch", "transformers", "numpy"}


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--version"]])
def test_nothing_heavy_is_imported_for_it(arguments):
    code = f"""
import sys
from hf_distca.cli.main import main
try:
    main({arguments!r})
except SystemExit:
    pass
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


@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_has_a_help(tool, capsys):
    with pytest.raises(SystemExit) as ended:
        main([tool, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: hf-distca {tool}")
