"""Fault of the package that computes gated delta rules on GPUs, flash-linear-attention (fla), and its remedy."""

import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version
from torch import nn

from hf_distca.models.decoder import mixing_layers, mixing_modules, stock_forward
from hf_distca.models.mixing import DELTA_RULE, functions

FLA, TRITON, TILELANG = "fla-core", "triton", "tilelang"
"""Distributions on which the fault depends. flash-linear-attention before 0.4 has no fla-core."""
HOPPER = (9, 0)
BROKEN_FROM, FIXED_IN = Version("3.4.0"), Version("3.7.1")
"""Versions of Triton: the first that compiles a gated backward wrongly on Hopper, and the first
that does not."""
REMEDY = f"pip install 'triton>={FIXED_IN}', or pip install tilelang, which fla then uses instead"


def backward_fault(capability: tuple[int, int], versions: Mapping[str, str | None]) -> str | None:
    """Return why fla's gated delta rule has no backward on a GPU with these packages.

    None if it has one.

    Args:
        capability: compute capability of the GPU.
        versions: versions of fla, Triton and tilelang by name; None or no entry for what is not
            installed.
    """
    fla, triton, tilelang = (versions.get(name) for name in (FLA, TRITON, TILELANG))
    if capability != HOPPER or fla is None or triton is None or tilelang is not None:
        return None
    if not BROKEN_FROM <= Version(triton) < FIXED_IN:
        return None
    return (
        f"fla {fla} raises in the backward of gated delta rules on Hopper with Triton {triton}: "
        f"Triton {BROKEN_FROM} and newer, before {FIXED_IN}, compiles it to incorrect results "
        "(fla #640)"
    )


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def versions_that_matter(
    version_of: Callable[[str], str | None] = installed_version,
) -> dict[str, str | None]:
    """Return the versions on which `backward_fault` depends."""
    versions = {name: version_of(name) for name in (FLA, TRITON, TILELANG)}
    return versions | {FLA: versions[FLA] or version_of("flash-linear-attention")}


def uses_fla(model: nn.Module) -> bool:
    """Return whether gated delta rules of a model's layers are computed by fla."""
    modules = (module for layer in mixing_layers(model) for module in mixing_modules(layer))
    return any(
        _is_of_fla(inspect.unwrap(stock_forward(module)).__globals__[DELTA_RULE])
        for module in modules
        if DELTA_RULE in (functions(module) or ())
    )


def _is_of_fla(function: Callable[..., Any]) -> bool:
    """Return whether transformers' function calls fla, and not its own code in torch or a kernel of the Hub."""
    try:
        implementation = inspect.getclosurevars(function).nonlocals.get("implementation")
    except TypeError:  # a kernel of the Hub
        return False
    return (getattr(implementation, "__module__", None) or "").split(".")[0] == "fla"
