"""Versions of what is installed, against those that hf_distca was made for."""

import platform
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, metadata, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hf_distca.cli.findings.finding import Finding

NAME = "hf-distca"
DEVELOPMENT = "dev"
SAME_EVERYWHERE = (NAME, "torch", "transformers", "accelerate", "deepspeed", "attention_kernel")
"""Findings that ranks must share: what they exchange, and when, is for these to say."""


def version_findings() -> list[Finding]:
    """Python, hf_distca, and the packages that it needs or can use."""
    try:
        told = metadata(NAME)
    except PackageNotFoundError:
        return [
            Finding(
                "versions",
                f"{NAME} is not installed as a package, so which versions it needs is not known",
                "pip install it, from a wheel or with -e from a checkout",
            )
        ]
    extras = [extra for extra in told.get_all("Provides-Extra", []) if extra != DEVELOPMENT]
    needs = [Requirement(line) for line in told.get_all("Requires-Dist", [])]
    python = platform.python_version()
    return [
        _finding("python", python, SpecifierSet(told["Requires-Python"]), "make a new environment with such a Python"),
        Finding(NAME, told["Version"]),
        *package_findings(needs, extras, installed),
    ]


def agreement_findings(by_rank: Sequence[Sequence[Finding]]) -> list[Finding]:
    """What is said where ranks have different versions, or different kernels by themselves.

    Args:
        by_rank: [ranks] the findings of each.
    """
    of_rank = [{finding.name: finding.found for finding in findings} for findings in by_rank]
    differing = [name for name in SAME_EVERYWHERE if len({found.get(name) for found in of_rank}) > 1]
    if not differing:
        return []
    return [
        Finding(
            "ranks differ",
            f"in {', '.join(differing)}",
            "install the same packages on every host; where GPUs differ, name an attention_kernel that all have",
            needed=True,
        )
    ]


def installed(package: str) -> str | None:
    """The version of a package; None if it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def package_findings(
    needs: Sequence[Requirement], extras: Sequence[str], version_of: Callable[[str], str | None]
) -> list[Finding]:
    """A finding for each package that is needed, and for each that an extra names.

    Args:
        needs: of hf_distca, with those of its extras.
        extras: that are looked at.
        version_of: a package's version; None if it is not there.
    """
    return [_package(need, extra, version_of(need.name)) for need, extra in _in_order(needs, extras)]


def _in_order(needs: Sequence[Requirement], extras: Sequence[str]) -> Iterator[tuple[Requirement, str]]:
    """Each package with the extra that it belongs to; "" for those that are always needed, which come first."""
    for extra in ("", *extras):
        for need in needs:
            always = need.marker is None or need.marker.evaluate({"extra": ""})
            wanted = need.marker is None or need.marker.evaluate({"extra": extra})
            if wanted and always == (not extra):
                yield need, extra


def _package(need: Requirement, extra: str, found: str | None) -> Finding:
    install = f"pip install '{need.name}{need.specifier}'"
    if found is None and extra:
        return Finding(need.name, f"not installed; pip install '{NAME}[{extra}]' if you want it")
    if found is None:
        return Finding(need.name, f"not installed, needs {need.specifier}", install, needed=True)
    return _finding(need.name, found, need.specifier, install)


def _finding(name: str, found: str, allowed: SpecifierSet, change: str) -> Finding:
    if allowed.contains(found, prereleases=True):
        return Finding(name, found)
    return Finding(name, f"{found}, needs {allowed}", change, needed=True)
