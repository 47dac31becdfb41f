"""`hf_distca.record`: what a rank prints and what the launcher learns when a script's main function
fails.
"""

import argparse
import errno
import json
import os
import signal

import pytest

import hf_distca
from hf_distca.checks.refusal import PackageError, Refusal, RefusedError
from hf_distca.dispatch.waits import OtherRankError
from hf_distca.kernel_names import MissingPackageError
from hf_distca.trainer.resuming import full_disk_named
from hf_distca.units import read_tokens

REFUSAL = Refusal("x=1 is set", "it has no effect", "set x=0")


@pytest.fixture(params=["0", "1"])
def rank(request, monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", request.param)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    interrupt = signal.getsignal(signal.SIGINT)
    yield int(request.param)
    signal.signal(signal.SIGINT, interrupt)


def fail(kind: str) -> None:
    """Fail inside of other calls, as in a training."""
    if kind == "refused":
        try:
            raise KeyError("inside")
        except KeyError as error:
            raise REFUSAL.error() from error
    if kind == "unit":
        read_tokens("32q")
    if kind == "option":
        argparse.ArgumentParser("train.py").parse_args(["--nosuch"])
    if kind == "other rank":
        raise OtherRankError("rank 3 failed: ValueError: boom")
    if kind == "explained":
        raise KeyboardInterrupt("interrupted after step 1")
    if kind == "package":
        raise PackageError("install trl")
    if kind == "crash":
        raise RuntimeError("boom")
    if kind == "bug":
        raise ValueError("boom")
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("kind", "code", "sentence"),
    [
        ("refused", 1, "x=1 is set, but it has no effect; set x=0"),
        ("unit", 1, "must be a number of tokens, such as 32768 or '32k', got '32q'"),
        ("option", 1, "train.py: error: unrecognized arguments: --nosuch"),
        ("package", 1, "install trl"),
        ("other rank", 1, "rank 3 failed: ValueError: boom"),
        ("interrupted", 130, "interrupted"),
        ("explained", 130, "interrupted after step 1"),
    ],
)
def test_rank_0_prints_one_line_and_others_print_nothing(
    rank, capsys, tmp_path, kind, code, sentence
):
    with pytest.raises(SystemExit) as ended:
        hf_distca.record(fail)(kind)
    assert ended.value.code == code
    assert capsys.readouterr() == ("", f"{sentence}\n" if rank == 0 else "")
    file = tmp_path / "error.json"
    assert file.exists() is (code == 1)
    if (
        file.exists()
    ):  # the launcher shows the call stack: it is the sentence alone, with the name of its class
        (line,) = json.loads(file.read_text())["message"]["extraInfo"]["py_callstack"].splitlines()
        assert line.endswith(f"Error: {sentence}")


def test_a_full_disk_is_one_line_of_the_rank_that_found_it(rank, capsys, tmp_path):
    def fill() -> None:
        with full_disk_named(tmp_path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(SystemExit):
        hf_distca.record(fill)()
    _, line = capsys.readouterr()
    remedy = "free disk space or set another output_dir"
    assert line == f"disk full: {tmp_path} is incomplete; {remedy}\n"


@pytest.mark.parametrize(("kind", "error"), [("crash", RuntimeError), ("bug", ValueError)])
def test_a_crash_keeps_its_traceback(rank, capsys, tmp_path, kind, error):
    with pytest.raises(error, match=r"^boom$"):
        hf_distca.record(fail)(kind)
    assert capsys.readouterr() == ("", "")
    stack = json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"][
        "py_callstack"
    ]
    assert "Traceback" in stack
    assert "in fail" in stack


def test_a_function_that_ends_well_returns_as_before(rank, tmp_path):
    assert hf_distca.record(lambda x, y: (x, y))(1, y=2) == (1, 2)
    assert not (tmp_path / "error.json").exists()


def test_refusals_are_errors_of_values_and_packages():
    assert isinstance(REFUSAL.error(), RefusedError)
    assert issubclass(RefusedError, ValueError)
    assert issubclass(MissingPackageError, RefusedError)
    assert issubclass(MissingPackageError, ImportError)
