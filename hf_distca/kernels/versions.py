"""Differences of FlashAttention's versions in one table, and the import of their packages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module, metadata
from types import ModuleType
from typing import Any

from .split import Grid

_OF_LONGEST_Q, _OF_LONGEST = Grid(by_q=1, by_k=0), Grid(by_q=2, by_k=1)
_EVEN = Grid(by_q=0, by_k=0)  # blocks that fetch tasks, or are numbered through them: empty ones are few


class MissingPackageError(ImportError):
    """A kernel's package is not installed; other import errors are of installed packages."""


@dataclass(frozen=True, kw_only=True)
class Version:
    """One FlashAttention: its GPUs, its package, and the arguments of its varlen functions.

    Attributes:
        majors: major compute capabilities of the GPUs that it runs on; `gpus` names them in words.
        softcap: whether scores can be capped.
        forward_grid, backward_grid: thread blocks of a kernel whose number depends on the longest task.
        distribution: name of the package for pip. A module of the name alone proves nothing: flash-attn brings a
            folder of FlashAttention-4 along, which cannot be imported without packages that it does not ask for.
        functions: names of the functions for forward and backward; `has` is a further name, present from `newer` on.
        causal: the argument for `AttentionParams.causal`.
        no_window: both sides of a window that sees all keys.
        no_softcap: a forward's softcap where scores are not capped.
        in_place: whether the backward takes do first and writes dq, dk and dv into given tensors, or takes do behind o
            and returns dq, dk and dv.
        forward, backward: further arguments of the function for this direction.
    """

    kernel: str
    majors: Sequence[int] = range(8, 100)
    gpus: str = "8.0 (Ampere) or later"
    softcap: bool = True
    forward_grid: Grid = _OF_LONGEST_Q
    backward_grid: Grid = _OF_LONGEST
    distribution: str = ""
    module: str = ""
    install: str = ""
    functions: tuple[str, ...] = ()
    has: tuple[str, ...] = ()
    newer: str = "a newer one"
    causal: str = "causal"
    no_window: int | None = None
    no_softcap: float | None = None
    in_place: bool = True
    forward: Mapping[str, Any] = field(default_factory=dict)
    backward: Mapping[str, Any] = field(default_factory=dict)

    @property
    def installed(self) -> bool:
        """Whether pip knows the package; imports nothing."""
        try:
            metadata.distribution(self.distribution)
        except metadata.PackageNotFoundError:
            return False
        return True

    @property
    def needed(self) -> str:
        """The error's text where the package is not installed."""
        return f"kernel {self.kernel!r} needs the {self.distribution} package: {self.install}"

    def load(self) -> ModuleType:
        """Import the module; raise MissingPackageError if the package is not installed, else ImportError."""
        try:
            return import_module(self.module)
        # Built for another torch or CUDA, a package fails with an OSError or an AttributeError as well.
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            lacking = error.name if isinstance(error, ModuleNotFoundError) else None
            if self.installed:
                build = f"install a build for this torch and CUDA: {self.install}"
                module = f"install what has {lacking}; PYTHONPATH ignores .pth files: add the folder that one names"
                raise ImportError(
                    f"kernel {self.kernel!r}: the {self.distribution} package is installed, but cannot be imported: "
                    f"{why}; {build if lacking is None else module}"
                ) from error
            absent = f"{self.module}.".startswith(f"{lacking}.")
            raise MissingPackageError(self.needed if absent else f"{self.needed} ({why})") from error

    def functions_of(self, module: Any) -> list[Any]:
        """Return the functions for forward and backward; raise ImportError if the package is too old."""
        lacking = [name for name in (*self.functions, *self.has) if not hasattr(module, name)]
        if lacking:
            raise ImportError(
                f"kernel {self.kernel!r}: the {self.distribution} package has no {' and '.join(lacking)}; install "
                f"{self.newer}: {self.install}"
            )
        return [getattr(module, name) for name in self.functions]


_OF_3 = "--find-links https://download.pytorch.org/whl/flash-attn-3/"

TORCH_VARLEN = Version(kernel="torch_varlen", softcap=False)
FLASH_ATTN = Version(
    kernel="flash_attn",
    distribution="flash-attn",
    module="flash_attn.flash_attn_interface",
    install="pip install 'hf-distca[flash-attn]' (it needs CUDA); kernel 'torch_varlen' comes with torch",
    functions=("_flash_attn_varlen_forward", "_flash_attn_varlen_backward"),
    has=("_wrapped_flash_attn_varlen_forward",),  # with the window as two numbers
    newer="2.7 or later",
    no_window=-1,
    no_softcap=0.0,
    forward={"dropout_p": 0.0},
    backward={"dropout_p": 0.0, "alibi_slopes": None},
)
FLASH_ATTN_3 = Version(
    kernel="flash_attn_3",
    majors=(9,),
    gpus="9.0 (Hopper)",
    forward_grid=_EVEN,
    distribution="flash-attn-3",
    module="flash_attn_interface",
    install=f"pip install flash-attn-3 {_OF_3} (or build it from the hopper folder of Dao-AILab/flash-attention)",
    functions=("fwd", "bwd"),
    causal="is_causal",
    no_window=-1,
    no_softcap=0.0,
    forward={"num_splits": 1},  # splits are for queries of few rows
)
FLASH_ATTN_4 = Version(
    kernel="flash_attn_4",
    majors=(9, 10),
    gpus="9.0 (Hopper) or 10.x (Blackwell)",
    forward_grid=_EVEN,
    backward_grid=_EVEN,
    distribution="flash-attn-4",
    module="flash_attn.cute.interface",
    install="pip install --pre flash-attn-4 (on CUDA 13: 'flash-attn-4[cu13]')",
    functions=("_flash_attn_fwd", "_flash_attn_bwd"),
    in_place=False,
    forward={"return_lse": True},
)
PACKAGES = {version.kernel: version for version in (FLASH_ATTN, FLASH_ATTN_3, FLASH_ATTN_4)}
"""The versions that come in packages, by kernel."""
