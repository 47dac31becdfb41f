"""The set-up of `make gpu` without a network: a Python with packages, of which one pin does not hold, and wheels."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pip
import pytest

from tests.launch import ROOT

MACHINE = {
    "accelerate": ("1.15.0", []),
    "huggingface-hub": ("1.33.0", []),
    "numpy": ("1.26.0", []),  # too old
    "psutil": ("7.0.0", []),
    "torch": ("2.11.0+cu130", ["nvidia-nccl==1"]),  # not there
    "tqdm": ("4.70.0", []),
    "transformers": ("5.17.0", ["tqdm<4"]),  # a pin that does not hold: pip resolves nothing here
    "fsspec": ("2026.9.0", ["aiohttp; extra == 'http'"]),
    "aiohttp": ("3.10.0", []),
}
"""Packages of the machine: versions, and what they need."""
CARRIED = {
    "datasets": ("5.0.0", ["dill<0.4.2", "fsspec[http]<=2026.4.0", "no-such; python_version < '3'"]),
    "dill": ("0.4.1", ["this; extra == 'all'"]),
    "greenlet": ("3.5.6", []),
    "numpy": ("9.0.0", []),
    "tqdm": ("9.0.0", []),
}
"""Packages that there are wheels of."""


def metadata(name: str, version: str, needs: list[str]) -> str:
    return "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]) + "".join(
        f"\nRequires-Dist: {need}" for need in needs
    )


def install(site: Path, name: str, version: str, needs: list[str]) -> None:
    module = name.replace("-", "_")
    (site / f"{module}.py").write_text(f"version = {version!r}")
    (site / f"{module}-{version}.dist-info").mkdir()
    (site / f"{module}-{version}.dist-info" / "METADATA").write_text(metadata(name, version, needs))


def make_wheel(folder: Path, name: str, version: str, needs: list[str], tag: str = "py3-none-any") -> Path:
    path = folder / f"{name}-{version}-{tag}.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", f"version = {version!r}")
        wheel.writestr(f"{info}/METADATA", metadata(name, version, needs))
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def machine(tmp_path) -> Path:
    """A virtual environment with packages and pip."""
    folder = tmp_path / "machine"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    here = Path(pip.__file__).parents[1]
    for name in ("pip", "packaging"):
        (site / name).symlink_to(here / name)
    install(site, "packaging", "26.0", [])
    for name, (version, needs) in MACHINE.items():
        install(site, name, version, needs)
    # As an editable package, or cutlass: found by a .pth file alone.
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "by_pth.py").touch()
    (site / "by_pth.pth").write_text(str(tmp_path / "elsewhere"))
    return folder


@pytest.fixture
def wheels(tmp_path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name, (version, needs) in CARRIED.items():
        make_wheel(folder, name, version, needs)
    return folder


def set_up(machine: Path, wheels: Path, environment: Path) -> "subprocess.CompletedProcess[str]":
    """Make it by the Makefile."""
    words = [f"{environment}/.setup", f"GPU_ENVIRONMENT={environment}", f"WHEELS={wheels}"]
    return subprocess.run(
        ["make", "--no-print-directory", *words, f"PYTHON={machine}/bin/python"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
    )


def test_what_is_missing_or_too_old_is_installed_and_nothing_else(machine, wheels, tmp_path):
    make_wheel(wheels, "greenlet", "3.5.10", [])  # the newer of two, which a comparison of texts would not take
    environment = tmp_path / "environment"
    done = set_up(machine, wheels, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    (site,) = environment.glob("lib/python*/site-packages")
    installed = {path.stem for path in site.glob("*.dist-info")}
    assert installed == {"datasets-5.0.0", "dill-0.4.1", "greenlet-3.5.10", "numpy-9.0.0"}
    code = "import dill, torch, tqdm, numpy, by_pth; print(torch.version, tqdm.version, numpy.version)"
    told = subprocess.run([environment / "bin" / "python", "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "2.11.0+cu130 4.70.0 9.0.0\n"


def test_what_is_missing_all_the_same_is_said_before_anything_is_made(machine, wheels, tmp_path):
    (site,) = machine.glob("lib/python*/site-packages")
    for name in ("transformers-5.17.0", "aiohttp-3.10.0"):
        (site / f"{name}.dist-info" / "METADATA").unlink()
        (site / f"{name}.dist-info").rmdir()
    install(site, "transformers", "4.57.0", [])
    for path in wheels.glob("greenlet-*"):
        path.unlink()
    make_wheel(wheels, "dill", "0.4.2", ["xxhash"])
    done = set_up(machine, wheels, tmp_path / "environment")
    assert done.returncode != 0
    for sentence in (
        "greenlet>=3.0 is needed, none is installed",
        "transformers<6,>=5.17 is needed, 4.57.0 is installed",
        "aiohttp is needed by datasets, none is installed",
        "xxhash is needed by dill, none is installed",
        "`make gpu-wheels`",
    ):
        assert sentence in done.stderr
    assert "nvidia" not in done.stderr
    assert not (tmp_path / "environment").exists()
