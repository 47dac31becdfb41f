"""Which kernel "auto" is."""

import sys
from types import SimpleNamespace

import pytest
import torch

from hf_distca.kernels import AttentionParams, Need, choose_kernel, get_kernel
from hf_distca.kernels.versions import PACKAGES
from tests.kernels.cases import CASES, assert_matches_reference

CUDA = torch.device("cuda")
ALL = "flash_attn flash_attn_3 flash_attn_4"


def need(dtype=torch.bfloat16, head_dim=128, values=None, **params) -> Need:
    return Need(dtype, head_dim, head_dim if values is None else values, AttentionParams(1.0, **params))


LLAMA = (need(),)
GEMMA2 = (need(head_dim=256, softcap=50.0), need(head_dim=256, softcap=50.0, window=4096))
GEMMA3 = (need(head_dim=256), need(head_dim=256, window=1024))
GPT_OSS = (need(head_dim=64), need(head_dim=64, window=128))
DEEPSEEK = (need(head_dim=192, values=128),)


@pytest.fixture
def only(installed, monkeypatch):
    """Leaves some packages and takes the others away."""

    def leave(names: str) -> None:
        for name, package in PACKAGES.items():
            if name not in names.split():
                monkeypatch.setitem(sys.modules, package.module, None)
        monkeypatch.setitem(sys.modules, "kernels", None)

    return leave


@pytest.mark.parametrize(
    ("major", "packages", "needs", "chosen"),
    [
        (8, "", (), "torch_varlen"),
        (8, ALL, LLAMA, "torch_varlen"),
        (8, ALL, GEMMA2, "flash_attn"),
        (9, "", (), "torch_varlen"),
        (9, "flash_attn", LLAMA, "torch_varlen"),
        (9, "flash_attn_4", LLAMA, "flash_attn_4"),
        (9, ALL, (), "flash_attn_3"),
        (9, ALL, GEMMA2, "flash_attn_3"),
        (9, "flash_attn", GEMMA2, "flash_attn"),
        (9, ALL, DEEPSEEK, "flash_attn_3"),
        (10, "", LLAMA, "torch_varlen"),
        (10, "flash_attn_3", LLAMA, "torch_varlen"),
        (10, ALL, (), "flash_attn_4"),
        (10, ALL, GPT_OSS, "flash_attn_4"),
        (10, ALL, GEMMA3, "torch_varlen"),
        (10, ALL, GEMMA2, "flash_attn"),
        (12, ALL, LLAMA, "torch_varlen"),
    ],
)
def test_the_fastest_that_can_do_it(major, packages, needs, chosen, only, capability):
    only(packages)
    capability(major)
    assert choose_kernel(CUDA, needs)[0].name == chosen
    assert get_kernel("auto", CUDA, needs).name == chosen


def test_it_says_why_faster_ones_are_not_it(only):
    only("flash_attn_4")
    kernel, passed_over = choose_kernel(CUDA, (need(dtype=torch.float16),))
    assert kernel.name == "flash_attn_4"
    assert list(passed_over) == ["flash_attn_3"]
    assert "pip install flash-attn-3" in passed_over["flash_attn_3"]


def test_no_kernel_that_is_there_has_softcap(only):
    only("")
    with pytest.raises(ValueError, match=r"GPU of compute capability 9\.0") as error:
        get_kernel("auto", CUDA, GEMMA2)
    lines = str(error.value).splitlines()[1:]
    assert [line.split("'")[1] for line in lines] == ["flash_attn_3", "flash_attn_4", "torch_varlen", "flash_attn"]
    assert "pip install flash-attn-3" in lines[0]
    assert "does not support softcap, got 50.0" in lines[2]


def test_nothing_is_downloaded_unasked(only, monkeypatch):
    only("")
    hub = SimpleNamespace(get_kernel=lambda *_, **__: pytest.fail("the hub was asked"))
    monkeypatch.setitem(sys.modules, "kernels", hub)
    assert get_kernel("auto", CUDA).name == "torch_varlen"


def test_a_name_that_was_given_is_never_another(only, capability):
    only(ALL)
    capability(10)
    with pytest.raises(ValueError, match=r"kernel 'flash_attn_3' needs a GPU of compute capability 9\.0"):
        get_kernel("flash_attn_3", CUDA, LLAMA)
    with pytest.raises(ValueError, match="kernel 'torch_varlen' does not support softcap"):
        get_kernel("torch_varlen", CUDA, GEMMA2)


def test_the_exchange_is_left_room(only, installed):
    only(ALL)
    for name, margin in (("auto", 5), ("flash_attn_3", 8)):
        installed["flash_attn_3"].sm_margins.clear()
        assert_matches_reference(get_kernel(name, CUDA, sm_margin=margin), CASES["one_row_each"], torch.bfloat16)
        assert installed["flash_attn_3"].sm_margins == {margin}


def test_other_devices():
    assert get_kernel("auto", torch.device("cpu"), LLAMA).name == "cpu"
    with pytest.raises(ValueError, match="kernel 'cpu' computes in"):
        get_kernel("auto", torch.device("cpu"), (need(dtype=torch.int8),))
    with pytest.raises(ValueError, match="'auto' chooses for cpu and cuda devices only, got mps"):
        get_kernel("auto", torch.device("mps"))
