"""The kernel that a model gets, and what is said of it."""

import logging
import sys

import pytest
import torch

import hf_distca
from hf_distca import DistCAConfig, plan_settings
from tests.models_and_batches import small_model

CUDA = torch.device("cuda")
GEMMA2 = {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 50.0, "sliding_window": 24}


@pytest.fixture
def hopper(monkeypatch):
    """A GPU of compute capability 9.0 and no package."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for module in ("flash_attn", "flash_attn_interface", "kernels"):
        monkeypatch.setitem(sys.modules, module, None)


def chosen(model, **options) -> str:
    return plan_settings(model, DistCAConfig(**options), ranks=1, device=CUDA, dtype=torch.bfloat16).kernel


def test_it_is_said_which_and_why_not_a_faster_one(hopper, caplog, monkeypatch):
    with caplog.at_level(logging.INFO):
        assert chosen(small_model(), attention_kernel="torch_varlen") == "torch_varlen"  # named, and so not said
        assert chosen(small_model()) == "torch_varlen"
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        assert chosen(small_model()) == "torch_varlen"
    slower, fastest = caplog.records
    first, third, fourth = slower.getMessage().splitlines()
    assert first == "core attention is computed by kernel 'torch_varlen'; faster here, but not to be had:"
    assert "pip install flash-attn-3" in third
    assert "pip install --pre flash-attn-4" in fourth
    assert fastest.getMessage() == "core attention is computed by kernel 'torch_varlen'"
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.INFO]


def test_scores_that_are_capped_need_a_package(hopper):
    with pytest.raises(ValueError, match=r"(?s)no installed kernel.*does not support softcap, got 50\.0") as error:
        chosen(small_model("gemma2", **GEMMA2))
    assert "pip install 'hf-distca[flash-attn]'" in str(error.value)


def dispatcher_with(kernels: list[str]) -> str:
    """Which kernel this rank gets."""
    rank = torch.distributed.get_rank()
    settings = hf_distca.plan_settings(
        small_model(), DistCAConfig(attention_kernel=kernels[rank]), ranks=2, device=torch.device("cpu")
    )
    try:
        return hf_distca.Dispatcher(settings, torch.device("cpu")).kernel.name
    except (ValueError, RuntimeError) as error:
        return str(error)


def test_ranks_have_one_kernel(rank_pools):
    assert rank_pools[2].run(dispatcher_with, ["cpu", "auto"]) == ["cpu", "cpu"]
    for error in rank_pools[2].run(dispatcher_with, ["cpu", "reference"]):
        assert "settings differ between ranks" in error
