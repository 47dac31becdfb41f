"""Padded batches of one rank: hashes of sequences, and gradients of rows that they share."""

import pytest
import torch

from hf_distca.batches.limits import Limits
from hf_distca.dispatch.padded_rows import PaddedBatch, RowTravel, read_sequences
from hf_distca.dispatch.process_groups import Groups
from hf_distca.planner.padding import plan_padded
from hf_distca.planner.settings import PlanSettings
from tests.models_and_batches import SMALL_KIND

CPU = torch.device("cpu")


def test_sequences_with_equal_tokens_at_other_positions_share_no_rows():
    # Stock models number the columns, so left padding gives the same tokens other positions.
    input_ids_BL = torch.tensor([[5, 6, 7, 0], [0, 5, 6, 7]])
    mask_BL = (input_ids_BL != 0).long()
    columns_BL = torch.tensor([[0, 1, 2, 3]] * 2)
    own_positions_BL = torch.tensor([[0, 1, 2, 0], [0, 0, 1, 2]])
    shared = []
    for position_ids_BL in (columns_BL, own_positions_BL):
        batch = PaddedBatch({"input_ids": input_ids_BL, "position_ids": position_ids_BL}, mask_BL)
        lengths, hashes, _ = read_sequences(batch, Limits(), share_prefixes=True).summary
        settings = PlanSettings(1, 8, (SMALL_KIND,))
        shared.append(plan_padded([lengths], settings, [hashes]).sequences.shared_rows)
    assert shared == [0, 3]


@pytest.mark.parametrize(
    ("dtype", "first", "others", "expected"),
    [
        pytest.param(torch.bfloat16, 256.0, 1.0, 320.0, id="256 + 63, rounded once"),
        pytest.param(torch.float32, 256.0, 1.0, 319.0, id="float32"),
        pytest.param(torch.float64, 1.0, 2.0**-40, 1.0 + 63 * 2.0**-40, id="float64"),
    ],
)
def test_gradients_of_64_readers_of_a_row_are_added_up_in_at_least_float32(
    dtype, first, others, expected
):
    """In bfloat16, 256 + 1 is 256."""
    input_ids_BL = torch.full((64, 1), 5)
    batch = PaddedBatch({"input_ids": input_ids_BL}, torch.ones_like(input_ids_BL))
    sequences = read_sequences(batch, Limits(), share_prefixes=True)
    lengths, hashes, _ = sequences.summary
    planned = plan_padded([lengths], PlanSettings(1, 64, (SMALL_KIND,)), [hashes])
    travel = RowTravel(planned, sequences, input_ids_BL.shape, Groups(CPU, 30), CPU)
    gradients_F = torch.tensor([[first], *[[others]] * 63], dtype=dtype)
    gradients_N = travel.gradients(gradients_F)
    assert gradients_N.tolist() == [[expected]]
    assert gradients_N.dtype == dtype
