"""The state of the thread that a nano-batch finds when it goes on; that of a GPU needs no GPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_distca.patches.split import ThreadState


@pytest.mark.parametrize(
    "change",
    [{"autocast": True}, {"autocast_dtype": torch.bfloat16}, {"grad": False}, {"default_dtype": torch.float64}],
    ids=lambda change: next(iter(change)),
)
def test_each_part_of_the_state_is_restored(change: dict[str, Any]) -> None:
    outside = ThreadState.now("cuda")
    inside = replace(outside, **change)
    inside.restore()
    try:
        assert ThreadState.now("cuda") == inside == outside.inside()
    finally:
        outside.restore()
    assert ThreadState.now("cuda") == outside
