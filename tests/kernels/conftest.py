"""A GPU and packages that are not there."""

import sys
from types import SimpleNamespace

import pytest
import torch

from hf_distca.kernels.versions import PACKAGES
from tests.kernels.stand_ins import Aten, FlashAttn2, FlashAttn3, FlashAttn4


@pytest.fixture
def capability(monkeypatch):
    """Sets what GPU there is; at first one of Hopper's."""

    def have(major: int, minor: int = 0) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))

    have(9)
    return have


@pytest.fixture(scope="module")
def operators():
    """Stand-ins for what is registered with torch: its own operators and those of flash_attn_3."""
    found = {"torch_varlen": Aten(), "flash_attn_3": FlashAttn3("flash_attn_3")}
    yield found
    for stand_in in found.values():
        stand_in.library._destroy()


@pytest.fixture
def installed(monkeypatch, operators, capability):
    """All packages, by kernel."""
    modules = {"flash_attn": FlashAttn2(), "flash_attn_4": FlashAttn4(), "flash_attn_3": SimpleNamespace()}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, PACKAGES[name].module, module)
    for stand_in in operators.values():
        stand_in.calls.update(forward=0, backward=0)
        stand_in.head_dims.clear()
    return modules | operators
