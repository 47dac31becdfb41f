"""Counts of models with kernels: nothing is launched on fake tensors, and Liger's kernels are
counted.
"""

import sys
import threading
from types import MethodType, ModuleType

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations import liger, moe
from transformers.models.llama import modeling_llama

from hf_distca.memory.counted_step import count_peaks
from hf_distca.memory.counter import MemoryCounter
from hf_distca.memory.fitting import raised_in
from hf_distca.memory.launches import without_launches
from hf_distca.models.fake import fake_tensors, model_after
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings
from tests.models_and_batches import SMALL, small_kinds, small_model, small_run

triton = pytest.importorskip("triton")

TOKENS = 1024
SETTINGS = PlanSettings(1, TOKENS, small_kinds(), kernel="torch_varlen")
PLAN = plan_micro_batch([TOKENS], SETTINGS)
INTERMEDIATE = SMALL["intermediate_size"]
LAYERS = SMALL["num_hidden_layers"]


@triton.jit
def _multiply(gate, up, out):
    pass


_tuned = triton.autotune([triton.Config({})], key=[])(_multiply)


class _Multiplied(torch.autograd.Function):
    """Product of two tensors as Liger's SwiGLU has it: it keeps both, and writes their gradients
    over them.
    """

    @staticmethod
    def forward(ctx, gate, up):
        out = torch.empty_like(gate)
        _multiply[(1,)](gate, up, out)
        _tuned[(1,)](gate, up, out)
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx, d_out):
        gate, up = ctx.saved_tensors
        _multiply[(1,)](d_out, gate, up)
        return gate, up


def _mlp(self, x: Tensor) -> Tensor:
    return self.down_proj(_Multiplied.apply(self.gate_proj(x), self.up_proj(x)))


def _give_kernels(model: nn.Module, *, swiglu: bool = True, **_: object) -> None:
    if not swiglu:
        return
    modeling_llama.apply_rotary_pos_emb = lambda q, k, *_: (q, k)
    modeling_llama.added = True
    for layer in model.model.layers:
        layer.mlp.forward = MethodType(_mlp, layer.mlp)


@pytest.fixture
def launches(monkeypatch) -> list[str]:
    """Names of the classes that launched a kernel; nothing is launched."""
    noted: list[str] = []
    for launcher in (type(_multiply), type(_tuned)):
        monkeypatch.setattr(
            launcher, "run", lambda self, *_, **__: noted.append(type(self).__name__)
        )
    return noted


@pytest.fixture
def liger_kernel(monkeypatch) -> None:
    """A stand-in for Liger, whose MLP launches kernels."""
    functions = ModuleType("liger_kernel.transformers")
    functions._apply_liger_kernel_to_instance = _give_kernels
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", functions)
    monkeypatch.setattr(liger, "is_liger_kernel_available", lambda: True)


def test_a_count_launches_no_kernel_that_a_model_has(launches, monkeypatch):
    """As where Liger has changed transformers in the process before."""
    stock = count_peaks(model_after(small_model()), PLAN, 0, small_run()).on_device
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", _mlp)
    counted = count_peaks(model_after(small_model()), PLAN, 0, small_run()).on_device
    assert launches == []
    # In each layer the model's own MLP also keeps its activation.
    assert stock["activations"] - counted["activations"] == LAYERS * TOKENS * INTERMEDIATE * 4
    # Afterwards kernels are launched as before.
    rows = torch.ones(2, requires_grad=True)
    _Multiplied.apply(rows, rows).sum().backward()
    assert launches == ["JITFunction", "Autotuner", "JITFunction"]


def test_other_threads_launch_while_a_thread_counts(launches):
    with without_launches():
        with without_launches():
            _multiply[(1,)]()
        _multiply[(1,)]()
        other = threading.Thread(target=lambda: _multiply[(1,)]())
        other.start()
        other.join()
        assert launches == ["JITFunction"]
    with pytest.raises(KeyError), without_launches():
        raise KeyError
    _multiply[(1,)]()
    assert launches == 2 * ["JITFunction"]


def test_other_threads_multiply_by_experts_while_a_thread_counts():
    rows, weights, ends = torch.ones(2, 4), torch.ones(1, 4, 4), torch.tensor([2]).int()
    results = []
    with without_launches():
        other = threading.Thread(
            target=lambda: results.append(moe._grouped_mm(rows, weights, offs=ends))
        )
        other.start()
        other.join()
    assert results[0].tolist() == [[4.0] * 4] * 2
    assert moe._grouped_mm(rows, weights, offs=ends).tolist() == [[4.0] * 4] * 2


def _launch(x: Tensor) -> int:
    return x.data_ptr()


@pytest.mark.parametrize(
    "make_tensor",
    [
        lambda: torch.empty(4, 4),
        lambda: torch.empty(4, 4)[1:],
        lambda: torch.empty(4, 4) + 1,
        lambda: nn.Linear(2, 2).weight,
    ],
    ids=["tensor", "view", "result", "parameter"],
)
def test_fake_tensors_give_no_address_to_a_kernel(make_tensor):
    with (
        fake_tensors(),
        pytest.raises(RuntimeError, match="Cannot access data pointer") as raised,
    ):
        _launch(make_tensor())
    assert raised_in(raised.value) == "_launch of tests/memory/test_launches.py"


def test_kernels_that_liger_gives_a_model_when_training_starts(launches, liger_kernel):
    model = small_model()
    rope = modeling_llama.apply_rotary_pos_emb
    model.__class__ = type(
        "Own", (type(model),), {}
    )  # whose functions are in the file of the class below
    counter = MemoryCounter(model)
    stock, counted, without = (
        counter.count(PLAN, small_run(SETTINGS, liger=given)).parts["activations"]
        for given in (None, {}, {"swiglu": False})
    )
    assert without == stock
    # In each layer: an activation of the MLP, and what the rotation of Q and K keeps, their rotated
    # halves included.
    assert stock - counted >= LAYERS * TOKENS * INTERMEDIATE * 4
    # The model and transformers' file are as they were.
    assert launches == []
    assert modeling_llama.apply_rotary_pos_emb is rope
    assert not hasattr(modeling_llama, "added")
    assert "forward" not in vars(model.model.layers[0].mlp)


def test_gradients_that_a_step_of_one_micro_batch_has_not_made_yet():
    model = small_model(vocab_size=128)  # most of its memory are activations
    counter = MemoryCounter(model)
    often, once = (
        counter.count(PLAN, small_run(SETTINGS, accumulates=given)) for given in (True, False)
    )
    # At the peak, the end of the forward, no gradient exists.
    assert once.parts == often.parts
    assert often.state.gradients == 4 * model.num_parameters()
    assert once.state.gradients == 0
    # With few tokens the peak is near the end of the backward: only the embedding has no gradient
    # yet.
    few = PlanSettings(1, 8, small_kinds(), kernel="torch_varlen")
    once = MemoryCounter(model).count(plan_micro_batch([8], few), small_run(few, accumulates=False))
    assert once.state.gradients == 4 * (model.num_parameters() - 128 * SMALL["hidden_size"])
    # Shards of gradients, and buffers for them, exist at any time.
    often, once = (
        counter.count(PLAN, small_run(SETTINGS, strategy="zero2", accumulates=given))
        for given in (True, False)
    )
    assert once == often
