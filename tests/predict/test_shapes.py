from dataclasses import replace

import pytest

from hf_distca.predict.device_profile import DeviceProfile
from hf_distca.predict.shapes import LLAMA_8B, MixingShape
from hf_distca.predict.step_costs import step_costs

# A convolution of 5 channels over a row and the 3 before it; two heads with states of 64 by 7.
DECAY = MixingShape(
    layers=2,
    before_mixing=10,
    after_mixing=20,
    channels=5,
    width=3,
    heads=2,
    state=(64, 7),
)
DELTA_RULE = replace(DECAY, delta_rule=True)


@pytest.mark.parametrize(
    ("shape", "recurrence", "continued"),
    [
        (DECAY, 64 * 7 + 2 * 64 * 7, 64 * 7),
        (DELTA_RULE, 3 * 64 * 64 + 7 * (2 * 64 + 3 * 64), 64 * (2 * 64 + 3 * 64)),
    ],
    ids=["decay", "delta rule"],
)
def test_operations_of_a_token(shape, recurrence, continued):
    assert shape.operations == (5 * 4 + 2 * recurrence, 2 * continued)


@pytest.mark.parametrize(
    ("shape", "recurrence", "continued"),
    [
        # Values, decays and outputs, and a state for each 64 rows, written and read.
        (DECAY, 3 * 7 + 2 * 7, 3 * 7),
        (DELTA_RULE, 4 * 64 + 7 * (6 + 2), 64 * (6 + 2)),
    ],
    ids=["decay", "delta rule"],
)
def test_numbers_that_a_token_reads_and_writes(shape, recurrence, continued):
    assert shape.touched == (2 * 5 + 2 * recurrence, 2 * continued)


@pytest.mark.parametrize(
    ("shape", "a_size"), [(DECAY, 1), (DELTA_RULE, 64 * 64)], ids=["decay", "delta rule"]
)
def test_bytes_of_a_segments_a_and_b(shape, a_size):
    assert shape.state_bytes == 4 * 2 * (a_size + 64 * 7)


def test_gpus_of_a_rank_share_what_mixes():
    profile = DeviceProfile.load("h100")
    model = replace(LLAMA_8B, mixing=DECAY)
    one, two = (
        step_costs(model, profile, tensor_parallel=gpus, checkpointing=True).mixing
        for gpus in (1, 2)
    )
    assert one.halo == 3 * 5 * profile.bytes_per_value
    assert one.state == DECAY.state_bytes
    touched, _ = DECAY.touched
    operations, _ = DECAY.operations
    seconds = 2 * operations / profile.flops_per_second
    seconds += touched * profile.bytes_per_value / profile.bytes_per_second
    assert one.mix == pytest.approx(seconds)
    for name in ("halo", "state", "mix", "continued"):
        assert getattr(two, name) == pytest.approx(getattr(one, name) / 2)
    assert one.before_mixing < 2 * two.before_mixing  # each GPU has the whole hidden state
