import json

import pytest

from hf_distca.cli.main import main


@pytest.fixture
def run(capsys):
    """Run the command in this process; returns its exit status, what it printed, and its errors."""

    def run(*command: str) -> tuple[object, str, str]:
        try:
            status: object = main(command)
        except SystemExit as ended:
            status = ended.code
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


@pytest.fixture
def figures(run):
    """Run a subcommand with --json; returns the JSON object."""

    def figures(*command: str) -> dict:
        status, printed, errors = run(*command, "--json")
        assert status == 0, errors
        return json.loads(printed)

    return figures


@pytest.fixture
def without_memory(monkeypatch):
    """Let `simulate` leave out memory, which takes longer to count than everything else."""
    monkeypatch.setattr("hf_distca.memory.simulated.gpu_memory", lambda *_: lambda *_: (None, None))
