"""Makes an environment for `make gpu` without a network: it sees the packages of this Python, and gets what they lack.

Run: PYTHON benchmarks/gpu/environment.py FOLDER WHEELS, where PYTHON has torch, transformers and pip, and WHEELS is a
folder of wheels.

A wheel is installed where PYTHON has no such package, or one that is too old for pyproject.toml; nothing else changes.
pip is not asked to resolve what packages need: it fails where one pin among those that are installed does not hold.
What is missing after that is said before anything is made.
"""

import site
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
SET_UP_S = 60
"""Seconds that installing may take."""


def main(folder: Path, wheels: Path) -> str | None:
    """Make the environment; returns what is missing for it."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        needed = [Requirement(line) for line in tomllib.load(file)["project"]["dependencies"]]
    installed = by_name(distributions())
    chosen = lacking(installed, wheels, needed)
    carried = {name: package for name, (_, package) in chosen.items()}
    if missing := list(dict.fromkeys(still_missing(installed | carried, carried, needed))):
        return (
            f"{'; '.join(missing)}. Add it to benchmarks/gpu/wheels.txt, run `make gpu-wheels` where there is a "
            f"network, and bring {wheels}/"
        )
    venv.create(folder, clear=True, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # As Python does it at its start: the .pth files among these packages are read too.
    seen = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    (packages / "packages_of_python.pth").write_text("".join(f"import site; site.addsitedir({p!r})\n" for p in seen))
    if chosen:
        pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
        install = [*pip, "install", "--quiet", "--no-index", "--no-deps", *(str(file) for file, _ in chosen.values())]
        subprocess.run(install, check=True, timeout=SET_UP_S)
    return None


def by_name(packages: Iterable[Distribution]) -> dict[str, Distribution]:
    """Packages by name; of two of a name the first, which is the one that Python imports."""
    found: dict[str, Distribution] = {}
    for package in packages:
        found.setdefault(canonicalize_name(package.name), package)
    return found


def lacking(
    installed: Mapping[str, Distribution], wheels: Path, needed: Sequence[Requirement]
) -> dict[str, tuple[Path, Distribution]]:
    """Wheels of packages that are not installed, or too old: file and package by name, the newest of each."""
    too_old = {canonicalize_name(need.name) for need in needed if not is_met(need, installed)}
    chosen: dict[str, tuple[Path, Distribution]] = {}
    for file in wheels.glob("*.whl"):
        for name, package in by_name(distributions(path=[str(file)])).items():
            newest = name not in chosen or Version(chosen[name][1].version) < Version(package.version)
            if newest and (name not in installed or name in too_old):
                chosen[name] = file, package
    return chosen


def still_missing(
    have: Mapping[str, Distribution], carried: Mapping[str, Distribution], needed: Sequence[Requirement]
) -> Iterator[str]:
    """Say what pyproject.toml needs and is not there, and names that the carried packages need.

    Versions that packages ask of each other are not compared: some that do not hold do no harm.
    """
    for need in needed:
        if not is_met(need, have):
            package = have.get(canonicalize_name(need.name))
            yield f"{need} is needed, {package.version if package else 'none'} is installed"
    for package in carried.values():
        for need in needs(package):
            name = canonicalize_name(need.name)
            extra = needs(have[name], need.extras) if name in have else ()
            for wanted in (need, *extra):
                if canonicalize_name(wanted.name) not in have:
                    yield f"{wanted.name} is needed by {package.name}, none is installed"


def is_met(need: Requirement, have: Mapping[str, Distribution]) -> bool:
    """Whether a package is there in a version that is asked for; "2.11.0a0+build" counts as 2.11.0."""
    package = have.get(canonicalize_name(need.name))
    return package is not None and need.specifier.contains(Version(package.version).base_version)


def needs(package: Distribution, extras: Iterable[str] = ()) -> Iterator[Requirement]:
    """What a package needs here, with some of its extras."""
    for line in package.requires or ():
        need = Requirement(line)
        if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield need


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
