"""Packages of kernels, looked for without importing them."""

from importlib import metadata

import pytest

from hf_distca import kernel_names
from hf_distca.kernel_names import KERNEL_NAMES, KERNEL_PACKAGES, MissingPackageError


@pytest.fixture
def have(monkeypatch):
    """Let pip know some distributions, and Python some modules."""

    def have(*, distributions: tuple[str, ...] = (), modules: tuple[str, ...] = ()) -> None:
        def distribution(name: str) -> str:
            if name not in distributions:
                raise metadata.PackageNotFoundError(name)
            return name

        monkeypatch.setattr(metadata, "distribution", distribution)
        monkeypatch.setattr(
            kernel_names, "find_spec", lambda name: name if name in modules else None
        )

    return have


@pytest.mark.parametrize("kernel", KERNEL_PACKAGES)
def test_a_package_that_is_not_there_names_what_to_install(have, kernel):
    have()
    with pytest.raises(MissingPackageError, match=f"kernel '{kernel}' needs the .* package: pip"):
        kernel_names.check_installed(kernel)


@pytest.mark.parametrize("kernel", sorted(set(KERNEL_NAMES) - set(KERNEL_PACKAGES)))
def test_other_kernels_need_no_package(have, kernel):
    have()
    kernel_names.check_installed(kernel)


@pytest.mark.parametrize(
    ("kernel", "found"),
    [
        ("flash_attn", {"distributions": ("flash-attn",)}),
        ("flash_attn_4", {"modules": ("flash_attn",)}),  # without a distribution
        ("flash_attn_3", {"modules": ("kernels",)}),  # which downloads it
    ],
    ids=["distribution", "module", "hub"],
)
def test_what_may_bring_a_kernel_is_left_to_its_import(have, kernel, found):
    have(**found)
    kernel_names.check_installed(kernel)
