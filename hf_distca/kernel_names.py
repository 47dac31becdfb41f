"""Names of attention kernels and of their packages, for what must not wait for torch."""

from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

from hf_distca.checks.refusal import PackageError

KERNEL_NAMES = (
    "auto",
    "reference",
    "cpu",
    "torch_varlen",
    "flash_attn",
    "flash_attn_3",
    "flash_attn_4",
)
"""Values of `attention_kernel`: "auto", and the names of `hf_distca.kernels.KERNELS`."""


class MissingPackageError(PackageError):
    """A kernel's package is not installed; other import errors are of installed packages."""


@dataclass(frozen=True)
class KernelPackage:
    """The package that a kernel comes in.

    Attributes:
        kernel: name of the kernel.
        distribution: name for pip. A module of the name alone proves nothing: flash-attn brings a
            folder of FlashAttention-4 along, which cannot be imported without packages that it does
            not ask for.
        module: module with the kernel's functions.
        install: how to install the package.
        downloader: module that downloads a build where the package is missing; "" for none.
    """

    kernel: str
    distribution: str
    module: str
    install: str
    downloader: str = ""

    def missing(self) -> str:
        """Return the error's text if pip does not know the package, else nothing.

        Import nothing.
        """
        try:
            metadata.distribution(self.distribution)
        except metadata.PackageNotFoundError:
            return f"kernel {self.kernel!r} needs the {self.distribution} package: {self.install}"
        return ""


KERNEL_PACKAGES = {
    package.kernel: package
    for package in (
        KernelPackage(
            "flash_attn",
            "flash-attn",
            "flash_attn.flash_attn_interface",
            "pip install 'hf-distca[flash-attn]' (it needs CUDA); kernel 'torch_varlen' comes with "
            "torch",
        ),
        KernelPackage(
            "flash_attn_3",
            "flash-attn-3",
            "flash_attn_interface",
            "pip install flash-attn-3 --find-links https://download.pytorch.org/whl/flash-attn-3/ "
            "(or build it from the hopper folder of Dao-AILab/flash-attention)",
            downloader="kernels",
        ),
        KernelPackage(
            "flash_attn_4",
            "flash-attn-4",
            "flash_attn.cute.interface",
            "pip install --pre flash-attn-4 (on CUDA 13: 'flash-attn-4[cu13]')",
        ),
    )
}
"""The packages of kernels that do not come with torch or hf_distca, by the kernel's name."""


def check_installed(kernel: str) -> None:
    """Raise MissingPackageError if nothing on this host can bring a kernel. Import nothing.

    What is found may still be broken: `hf_distca.kernels.get_kernel` imports it.
    """
    package = KERNEL_PACKAGES.get(kernel)
    if package is None:
        return
    modules = (package.module.partition(".")[0], package.downloader)
    missing = package.missing()
    if missing and not any(find_spec(module) for module in modules if module):
        raise MissingPackageError(missing)
