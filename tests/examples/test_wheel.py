"""The wheel of a clean checkout, built from its sdist, runs the quickstart in an environment that
has what it declares and no more.
"""

import re
import shutil
import subprocess
import sys
import tarfile
from functools import partial
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import hf_distca
from tests.docs.test_pages import blocks, commands
from tests.examples.running import run
from tests.launch import ROOT
from tests.ranks import free_port

pytestmark = pytest.mark.launches

run_outside = partial(run, PYTHONPATH="")
"""Runs a command that sees nothing of this checkout."""
TEXT_BYTES = 12_000
"""Bytes of the quickstart's text that are trained on here."""


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """The files of the project that git knows, as they are."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no checkout of a git repository")
    folder = tmp_path_factory.mktemp("clone")
    for name in listed.stdout.split("\0"):
        if name and not name.startswith("benchmarks/") and (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def python(clone, tmp_path_factory) -> Path:
    """The Python of an environment with the wheel, and with what it declares, by links to what is
    installed here.
    """
    folder = tmp_path_factory.mktemp("environment")
    pip = [sys.executable, "-m", "pip"]
    wheels = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder / "wheels"]
    # As release.yml does: the wheel is built from the sdist.
    run_outside([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder], clone)
    (sdist,) = folder.glob("hf_distca-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"constraints.txt", "examples/train.py", "examples/configs/ddp.yaml"} <= names
    run_outside([*pip, "wheel", *wheels, sdist], ROOT.parent)
    wheel = folder / "wheels" / f"hf_distca-{hf_distca.__version__}-py3-none-any.whl"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    run_outside(
        [*pip, "--python", python, "install", "--no-deps", "--no-index", wheel],
        ROOT.parent,
    )
    (site,) = folder.glob("lib/python*/site-packages")
    (metadata,) = site.glob("hf_distca-*.dist-info")
    for package in closure(Distribution.at(metadata)):
        # What lies side by side in the site-packages here.
        for name in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(Path(str(package.locate_file(name))))
    accelerate = python.with_name("accelerate")
    accelerate.write_text(f'#!/bin/sh\nexec {python} -m accelerate.commands.accelerate_cli "$@"\n')
    accelerate.chmod(0o755)
    return python


def closure(package: Distribution) -> list[Distribution]:
    """All that a package needs, directly or not, without its extras."""
    distributions: dict[tuple[str, str], Distribution] = {}
    left = [(package, "")]
    while left:
        at, extra = left.pop()
        for need in map(Requirement, at.requires or ()):
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                keys = {(need.name, needed_extra) for needed_extra in ("", *need.extras)}
                for key in keys - distributions.keys():
                    distributions[key] = distribution(need.name)
                    left.append((distributions[key], key[1]))
    return list(distributions.values())


def test_the_quickstart_and_the_shown_scripts_train(python, tmp_path):
    """Run the README with the start method of Python 3.14, on the Python of the suite: pip installs
    no Python 3.14.

    A process that multiprocessing starts then imports the script again, which fails in a script
    without `if __name__ == "__main__"`.
    """
    method = "import multiprocessing; multiprocessing.set_start_method('forkserver', force=True)"
    (tmp_path / "sitecustomize.py").write_text(method)

    def in_shell(command: str) -> str:
        """Output of a command where the environment is activated."""
        environment = f"export PYTHONPATH={tmp_path} PATH={python.parent}:$PATH"
        return run_outside(["bash", "-c", f"{environment}; {command}"], tmp_path)

    started = "import multiprocessing; print(multiprocessing.get_start_method())"
    assert in_shell(f'python -c "{started}"').split() == ["forkserver"]
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    make_checkpoint, make_text, launch = (
        blocks("README.md", part="Quickstart")[0].replace("\\\n", " ").splitlines()
    )
    assert {make_checkpoint, make_text, launch} <= set(commands("docs/start/quickstart.md"))
    in_shell(f"{make_checkpoint} & {make_text}; wait")
    text = tmp_path / "my.txt"
    text.write_bytes(text.read_bytes()[:TEXT_BYTES])
    # On a free port: another launch may listen on the default port of accelerate.
    launch = launch.replace(
        "accelerate launch", f"accelerate launch --main_process_port {free_port()}"
    )
    printed = in_shell(f"{launch} --logging_steps 1 --num_train_epochs 2")
    losses = [float(number) for number in re.findall(r"'loss': '?([\d.]+)", printed)]
    assert losses[-1] < losses[0]
    assert losses[0] == pytest.approx(7.6, abs=0.2)  # ln 2048
    model = tmp_path / "runs" / "train" / "model.safetensors"
    model.unlink()
    shown = [
        *blocks("README.md", "python", "Quickstart"),
        *blocks("docs/start/quickstart.md", "python"),
    ]
    (tmp_path / "shown.py").write_text("\n".join(shown))
    assert in_shell("python shown.py").count("'train_loss'") == len(shown) == 2
    assert model.exists()


def test_its_commands_run_with_nothing_else(python, tmp_path):
    (tmp_path / "lengths.json").write_text("[4, 4, 2, 6]")
    options = ["--lengths", "lengths.json", "--ranks", "2", "--tokens-per-rank", "8"]
    printed = run_outside([python.with_name("hf-distca"), "plan", *options], tmp_path)
    assert "documents                      4 of 16 tokens" in printed
    code = "import hf_distca.cli.main as cli; print(cli.__file__); cli.main(['doctor'])"
    file, *findings = run_outside([python, "-c", code], tmp_path).splitlines()
    assert Path(file).is_relative_to(python.parents[1])
    packages = {
        line.split()[1]: line.split(maxsplit=2)[2] for line in findings if not line.startswith(" ")
    }
    assert packages["hf-distca"] == hf_distca.__version__
    assert packages["peft"].startswith("not installed")
    assert packages["deepspeed"].startswith("not installed")
