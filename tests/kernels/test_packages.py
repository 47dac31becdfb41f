"""Packages of kernels that are not installed, and those that are and cannot be imported."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hf_distca.kernels import choose_kernel, get_kernel
from hf_distca.kernels.versions import PACKAGES, MissingPackageError

CUDA = torch.device("cuda")
SYMBOL = 'raise ImportError("_C.abi3.so: undefined symbol: _ZN3c104cuda")'
LIBRARY = 'raise OSError("libcudart.so.12: cannot open shared object file")'
NO_CUTLASS = "import cutlass_of_a_pth_file"


@pytest.fixture
def package(tmp_path, monkeypatch, capability):
    """Puts a package on disk whose module fails; without a distribution pip knows nothing of it."""

    def put(name: str, fails: str, distribution: bool = True) -> None:
        *parents, module = PACKAGES[name].module.split(".")
        folder = tmp_path.joinpath(*parents)
        folder.mkdir(parents=True, exist_ok=True)
        for parent in [folder, *folder.parents][: len(parents)]:
            (parent / "__init__.py").touch()
        (folder / f"{module}.py").write_text(fails + "\n")
        if distribution:
            _known(tmp_path, PACKAGES[name].distribution)

    for loaded in [name for name in sys.modules if name.split(".")[0] in ("flash_attn", "flash_attn_interface")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, "kernels", None)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield put
    for loaded in [name for name in sys.modules if name.split(".")[0] in ("flash_attn", "flash_attn_interface")]:
        del sys.modules[loaded]


def _known(folder: Path, distribution: str) -> None:
    info = folder / f"{distribution.replace('-', '_')}-3.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 3.0.0\n")


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize(
    ("fails", "says"),
    [
        (SYMBOL, "ImportError: _C.abi3.so: undefined symbol: _ZN3c104cuda; install a build for this torch and CUDA"),
        (LIBRARY, "OSError: libcudart.so.12: cannot open shared object file; install a build for"),
        (NO_CUTLASS, "No module named 'cutlass_of_a_pth_file'; install what has cutlass_of_a_pth_file"),
    ],
)
def test_a_broken_package_is_an_error_that_says_why(name, fails, says, package):
    package(name, fails)
    with pytest.raises(ImportError, match="package is installed, but cannot be imported: ") as error:
        get_kernel(name, CUDA)
    assert says in str(error.value)
    assert not isinstance(error.value, MissingPackageError)


def test_auto_says_what_is_broken_and_takes_the_next(package):
    package("flash_attn_3", SYMBOL)
    choice = choose_kernel(CUDA)
    assert choice.kernel.name == "torch_varlen"
    assert "installed, but cannot be imported: ImportError: _C.abi3.so" in choice.passed_over["flash_attn_3"]
    assert "needs the flash-attn-4 package" in choice.passed_over["flash_attn_4"]


def test_the_hub_does_not_take_the_place_of_what_is_broken(package, monkeypatch):
    package("flash_attn_3", SYMBOL)
    hub = ModuleType("kernels")
    hub.get_kernel = lambda *_, **__: pytest.fail("the hub was asked")
    monkeypatch.setitem(sys.modules, "kernels", hub)
    with pytest.raises(ImportError, match="undefined symbol"):
        get_kernel("flash_attn_3", CUDA)


def test_a_broken_hub_package_is_not_taken_for_none(package, monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "kernels")
    (tmp_path / "kernels.py").write_text("import library_of_the_hub\n")
    with pytest.raises(ModuleNotFoundError, match="library_of_the_hub"):
        get_kernel("flash_attn_3", CUDA)


@pytest.mark.parametrize("fails", [SYMBOL, NO_CUTLASS])
def test_what_pip_does_not_know_is_missing_and_says_why_too(fails, package):
    """As the folder of FlashAttention-4 that comes with flash-attn."""
    package("flash_attn_4", fails, distribution=False)
    with pytest.raises(MissingPackageError, match=r"needs the flash-attn-4 package: .*\(\w*Error: "):
        get_kernel("flash_attn_4", CUDA)
