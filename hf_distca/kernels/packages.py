"""Packages that kernels come from: imported where they are there, and told apart from those that are broken."""

from dataclasses import dataclass
from importlib import import_module, metadata
from types import ModuleType


class MissingPackageError(ImportError):
    """A kernel's package is not installed; any other ImportError of a kernel says that its package cannot be used."""


@dataclass(frozen=True)
class Package:
    """A package that a kernel calls.

    Attributes:
        kernel: the kernel's name.
        distribution: what pip knows the package by. A module of the name alone proves nothing: flash-attn brings a
            folder of FlashAttention-4 along, which cannot be imported without packages that it does not ask for.
        module: what the kernel imports.
        install: how to install it.
    """

    kernel: str
    distribution: str
    module: str
    install: str

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
        """What to say where the package is not installed."""
        return f"kernel {self.kernel!r} needs the {self.distribution} package: {self.install}"

    def load(self) -> ModuleType:
        """Import the module.

        Raises:
            MissingPackageError: the package is not installed.
            ImportError: the package is installed, but cannot be imported: says why not.
        """
        try:
            return import_module(self.module)
        # Built for another torch or CUDA, a package fails with an OSError or an AttributeError as well.
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            lacking = error.name if isinstance(error, ModuleNotFoundError) else None
            if self.installed:
                remedy = f"install a build for this torch and CUDA: {self.install}"
                if lacking is not None:
                    remedy = (
                        f"install what has {lacking}; PYTHONPATH ignores .pth files: add the folder that one names"
                    )
                raise ImportError(
                    f"kernel {self.kernel!r}: the {self.distribution} package is installed, but cannot be imported: "
                    f"{why}; {remedy}"
                ) from error
            absent = f"{self.module}.".startswith(f"{lacking}.")
            raise MissingPackageError(self.needed if absent else f"{self.needed} ({why})") from error


PACKAGES = {
    package.kernel: package
    for package in (
        Package(
            "flash_attn",
            "flash-attn",
            "flash_attn.flash_attn_interface",
            "pip install 'hf-distca[flash-attn]' (it needs CUDA); kernel 'torch_varlen' comes with torch",
        ),
        Package(
            "flash_attn_3",
            "flash-attn-3",
            "flash_attn_interface",
            "pip install flash-attn-3 --find-links https://download.pytorch.org/whl/flash-attn-3/ (or build it from "
            "the hopper folder of Dao-AILab/flash-attention)",
        ),
        Package(
            "flash_attn_4",
            "flash-attn-4",
            "flash_attn.cute.interface",
            "pip install --pre flash-attn-4 (on CUDA 13: 'flash-attn-4[cu13]')",
        ),
    )
}
"""By kernel."""
