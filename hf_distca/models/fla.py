"""Fault of flash-linear-attention (fla), and its remedy.

This package computes gated delta rules on GPUs.
"""

import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version
from torch import nn

from hf_distca.models.decoder import stock_forward
from hf_distca.models.mixing_modules import DELTA_RULE, all_mixing_modules, functions

# Distributions on which the fault depends. flash-linear-attention before 0.4 has no fla-core.
FLA = "fla-core"
TRITON = "triton"
TILELANG = "tilelang"
HOPPER = (9, 0)
"""Compute capability of H100 and H200."""
BROKEN_FROM = Version("3.4.0")
"""First version of Triton that compiles a gated backward wrongly on Hopper."""
FIXED_IN = Version("3.7.1")
"""First later version of Triton that compiles it correctly."""
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
    get_version: Callable[[str], str | None] = installed_version,
) -> dict[str, str | None]:
    """Return the versions on which `backward_fault` depends."""
    versions = {name: get_version(name) for name in (FLA, TRITON, TILELANG)}
    if versions[FLA] is None:
        versions[FLA] = get_version("flash-linear-attention")
    return versions


def uses_fla(model: nn.Module) -> bool:
    """Return whether gated delta rules of a model's layers are computed by fla."""
    for module in all_mixing_modules(model):
        if DELTA_RULE in (functions(module) or ()):
            forward: Any = inspect.unwrap(stock_forward(module))
            if _calls_fla(forward.__globals__[DELTA_RULE]):
                return True
    return False


def _calls_fla(function: Callable[..., Any]) -> bool:
    """Return whether transformers' function calls fla.

    Otherwise it calls its own code in torch, or a kernel of the Hub.
    """
    try:
        implementation = inspect.getclosurevars(function).nonlocals.get("implementation")
    except TypeError:  # a kernel of the Hub
        return False
    package = (getattr(implementation, "__module__", None) or "").split(".")[0]
    return package == "fla"
