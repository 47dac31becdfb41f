"""Planned steps as torch's CUDA build runs them, on fake CUDA tensors: no device is needed, and nothing is computed.

What the CPU build of torch cannot do without numbers: the varlen kernel's operators are asked with CUDA tensors, and
every branch for CUDA is taken. Streams, events and pinned memory are stand-ins.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hf_distca.kernels import get_kernel
from tests.counting import empty_model, fake_group, without_numbers
from tests.dispatch.test_launches import MODELS, RANKS, SMALL, check_rows, run

pytestmark = [
    pytest.mark.cuda_build,
    pytest.mark.skipif(
        not torch.backends.cuda.is_built() or torch.cuda.is_available(),
        reason="needs torch's CUDA build, and no GPU: where there is one, make gpu shows more",
    ),
]

CUDA = torch.device("cuda", 0)
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MORE = {
    "mistral": HEADS | {"sliding_window": 96},
    "mixtral": HEADS | {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": None},
    "olmo2": HEADS,
    "phi3": HEADS | {"sliding_window": None},
}


def event(enable_timing: bool = False) -> SimpleNamespace:
    """`torch.cuda.Event`, of a device on which everything is over at once."""
    return SimpleNamespace(
        record=lambda: None, query=lambda: True, synchronize=lambda: None, elapsed_time=lambda _after: 0.0
    )


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    with (
        fake_group(RANKS) as group,
        patch("torch.cuda.Event", event),
        patch("torch.cuda.get_device_capability", lambda _device: (9, 0)),
    ):
        yield group


@pytest.mark.parametrize("model_type", [*MODELS, *MORE])
@pytest.mark.parametrize(
    ("layout", "turns", "checkpoint", "stage_rows"),
    [
        ("joint", False, "none", None),
        ("fixed", True, "none", None),
        ("joint", True, "non-reentrant", None),
        ("joint", True, "reentrant", None),
        ("joint", False, "none", 200),
        ("fixed", True, "non-reentrant", 100),
    ],
)
def test_step(group, model_type, layout, turns, checkpoint, stage_rows):
    with without_numbers(CUDA):
        model = empty_model(model_type, CUDA, **{**SMALL, **{**MODELS, **MORE}[model_type]})
        mode, kernel = run(model, group, layout, turns, checkpoint, CUDA, stage_rows)
    check_rows(kernel)
    kinds = {call.what for call in mode.calls if call.owner == "dispatch"}
    assert {"attention", "exchange", "copy", "view"} <= kinds
    assert all(parameter.grad.device == CUDA for parameter in model.model.layers.parameters())


def test_kernel_for_cuda():
    assert get_kernel("auto", CUDA).name == "torch_varlen"
