"""Choosing a kernel, describing a call, and what is refused."""

import pytest
import torch

from hf_distca.kernels import KERNEL_NAMES, AttentionParams, Need, TaskShapes, get_kernel
from tests.kernels.cases import Case, make_inputs

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_unknown_name_lists_the_valid_ones() -> None:
    with pytest.raises(ValueError, match="'sdpa'") as error:
        get_kernel("sdpa", CPU)
    assert all(name in str(error.value) for name in KERNEL_NAMES)


def test_shapes_on_host_and_device() -> None:
    shapes = TaskShapes.build([3, 0, 2], torch.tensor([5, 1, 2]), "cpu")
    assert (shapes.q_lens, shapes.k_lens) == ((3, 0, 2), (5, 1, 2))
    assert (shapes.cu_q.tolist(), shapes.cu_k.tolist()) == ([0, 3, 3, 5], [0, 5, 6, 8])
    assert (shapes.cu_q.dtype, shapes.cu_k.dtype) == (torch.int32, torch.int32)
    assert (shapes.max_q, shapes.max_k) == (3, 5)
    empty = TaskShapes.build([], [], "cpu")
    assert (empty.cu_q.tolist(), empty.max_q, empty.max_k) == ([0], 0, 0)
    with pytest.raises(ValueError, match="got 2 q_lens but 1 k_lens"):
        TaskShapes.build([1, 2], [3], "cpu")
    with pytest.raises(ValueError, match="0 or more"):
        TaskShapes.build([-1], [3], "cpu")


def test_what_is_made_once() -> None:
    shapes, made = TaskShapes.build([1], [1], "cpu"), []
    for key in ("a", "b", "a"):
        shapes.once(key, lambda key=key: made.append(key))
    assert made == ["a", "b"]
    assert TaskShapes.build([1], [1], "cpu").once("a", lambda: 5) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be at least 1"),
        ({"window": 4, "causal": False}, "a window needs causal=True"),
        ({"softcap": 0.0}, "softcap must be positive"),
    ],
)
def test_refused_params(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionParams(1.0, **options)


@pytest.mark.parametrize("kernel_name", ["cpu", "reference", "torch_varlen"])
def test_refused_tensors(kernel_name: str) -> None:
    kernel, params = get_kernel(kernel_name, CPU), AttentionParams(1.0)
    case = Case(q_lens=(3,), k_lens=(5,))
    inputs = make_inputs(case, torch.float32)
    q, k, v, shapes = inputs.q, inputs.k, inputs.v, inputs.shapes
    other = TaskShapes.build([3], [6], "cpu")
    for bad, message in [
        ((q, k.bfloat16(), v, shapes), "one dtype, got torch.float32, torch.bfloat16"),
        ((q, k, v, other), "3 query rows and 6 key/value rows, but q, k and v have 3, 5 and 5"),
        ((q, k[..., :8], v, shapes), "differ in head dim: 32 and 8"),
        ((q[:, :3], k, v, shapes), "q a multiple of it, got 2, 2 and 3"),
        ((q, k, v[:, :1], shapes), "got 2, 1 and 4"),
        ((q.flatten(1), k, v, shapes), r"kernels take q \[Q, H, D\]"),
        ((q, k[:2], v[:2], TaskShapes.build([3], [2], "cpu")), "task 0 has 3 query rows but only 2 key"),
    ]:
        with pytest.raises(ValueError, match=message):
            kernel.forward(*bad, params)
        lse = torch.zeros(3, 4)
        with pytest.raises(ValueError, match=message):
            kernel.backward(inputs.do, *bad[:3], inputs.do, lse, bad[3], params)


def test_the_cpu_kernel_says_what_it_cannot_do() -> None:
    get_kernel("cpu", CPU, [Need(torch.float32, 64, 64, AttentionParams(1.0))])
    with pytest.raises(ValueError, match="got cuda; on CUDA use 'torch_varlen'"):
        get_kernel("cpu", CUDA, [Need(torch.float32, 64, 64, AttentionParams(1.0))])
    with pytest.raises(ValueError, match=r"computes in float32, .*, got torch.int8"):
        get_kernel("cpu", CPU, [Need(torch.int8, 64, 64, AttentionParams(1.0))])


def test_the_reference_takes_everything() -> None:
    get_kernel("reference", CUDA, [Need(torch.float16, 999, 1, AttentionParams(1.0, softcap=2.0))])
