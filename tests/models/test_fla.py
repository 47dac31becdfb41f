"""The fault of fla's gated delta rules on Hopper: versions with it, and models that meet it."""

import logging
import sys
from types import ModuleType

import pytest
import torch
from transformers import AutoConfig
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.qwen3_next import modeling_qwen3_next

from hf_distca.models import fla
from hf_distca.models.fake import model_of_config
from hf_distca.models.fla import HOPPER, backward_fault, uses_fla
from hf_distca.trainer.assembly import warn_of_kernels
from tests.models_and_batches import SMALL
from tests.survey.tiny import tiny_config

BROKEN = {"fla-core": "0.6.0", "triton": "3.6.0", "tilelang": None}


def test_versions_and_gpus_that_have_the_fault():
    message = backward_fault((9, 0), BROKEN)
    assert message is not None
    assert message.startswith(
        "fla 0.6.0 raises in the backward of gated delta rules on Hopper with Triton 3.6.0"
    )


@pytest.mark.parametrize(
    "capability",
    [(8, 0), (8, 9), (10, 0), (12, 0)],
    ids=["Ampere", "Ada", "Blackwell", "consumer Blackwell"],
)
def test_gpus_without_the_fault(capability):
    assert backward_fault(capability, BROKEN) is None, capability


@pytest.mark.parametrize(
    "changed",
    [
        {"triton": "3.3.1"},
        {"triton": "3.7.1"},
        {"triton": "3.10.0"},
        {"triton": None},
        {"tilelang": "0.1.15"},
        {"fla-core": None},
    ],
    ids=["triton 3.3", "triton 3.7.1", "triton 3.10", "no triton", "tilelang", "no fla"],
)
def test_versions_without_the_fault(changed):
    assert backward_fault((9, 0), BROKEN | changed) is None, changed


@pytest.mark.parametrize("triton", ["3.4.0", "3.5.1", "3.7.0", "3.7.0+git1"])
def test_versions_of_triton_that_have_the_fault(triton):
    assert backward_fault((9, 0), BROKEN | {"triton": triton}), triton


def _model_with(monkeypatch, package: str):
    """A tiny hybrid whose delta rule transformers has found in a package of this name."""

    def chunk_gated_delta_rule():
        pass

    module = ModuleType(package)
    chunk_gated_delta_rule.__module__ = f"{package}.ops.gated_delta_rule"
    module.chunk_gated_delta_rule = chunk_gated_delta_rule
    module.__version__ = "0.6.0"
    monkeypatch.setitem(sys.modules, package, module)
    wrap = use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", package)
    stock = modeling_qwen3_next.torch_chunk_gated_delta_rule
    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", wrap(stock))
    return model_of_config(tiny_config("qwen3_next"), torch.float32)


def test_models_whose_layers_fla_computes(monkeypatch):
    assert not uses_fla(model_of_config(AutoConfig.for_model("llama", **SMALL), torch.float32))
    assert not uses_fla(model_of_config(tiny_config("kimi_linear"), torch.float32))
    with monkeypatch.context() as patches:
        assert not uses_fla(_model_with(patches, "another_package"))
    with monkeypatch.context() as patches:
        assert uses_fla(_model_with(patches, "fla"))


@pytest.mark.parametrize(
    ("package", "device", "capability", "triton", "warned"),
    [
        ("fla", "cuda", HOPPER, "3.6.0", True),
        ("another_package", "cuda", HOPPER, "3.6.0", False),
        ("fla", "cuda", HOPPER, "3.7.1", False),
        ("fla", "cuda", (8, 0), "3.6.0", False),
        ("fla", "cpu", HOPPER, "3.6.0", False),
    ],
)
def test_the_trainer_warns_before_the_first_backward(
    monkeypatch, caplog, package, device, capability, triton, warned
):
    model = _model_with(monkeypatch, package)
    monkeypatch.setattr(
        fla,
        "version",
        lambda name: {"fla-core": "0.6.0", "triton": triton}.get(name) or missing(name),
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with caplog.at_level(logging.WARNING, "hf_distca"):
        warn_of_kernels(model, torch.device(device))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warned
    if warned:
        assert caplog.messages[0].startswith(
            "the first backward of Qwen3NextForCausalLM will fail: fla 0.6.0 raises"
        )
        assert caplog.messages[0].endswith(fla.REMEDY)


def missing(name: str) -> str:
    raise fla.PackageNotFoundError(name)
