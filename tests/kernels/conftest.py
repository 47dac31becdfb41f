"""A GPU and packages that are not there."""

import sys
from types import ModuleType

import pytest
import torch

from tests.kernels.stand_ins import Aten, FlashAttn2, FlashAttn3, FlashAttn4, removed_afterwards


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
    with removed_afterwards(Aten()) as aten, removed_afterwards(FlashAttn3("flash_attn_3")) as third:
        yield {"torch_varlen": aten, "flash_attn_3": third}


@pytest.fixture
def installed(monkeypatch, operators, capability):
    """All packages, by kernel."""
    interfaces = {"flash_attn": FlashAttn2(), "flash_attn_4": FlashAttn4()}
    package, cute = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    package.flash_attn_interface, package.cute = interfaces["flash_attn"], cute
    cute.interface = interfaces["flash_attn_4"]
    for module in (package, cute, *interfaces.values(), ModuleType("flash_attn_interface")):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for stand_in in operators.values():
        stand_in.calls.update(forward=0, backward=0)
    return interfaces | operators
