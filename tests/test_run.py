"""One training, described once: what follows from settings, a model's shape and a launch."""

from dataclasses import replace

import pytest

from hf_distca.config import DistCAConfig
from hf_distca.predict.device_profile import DeviceProfile
from hf_distca.predict.shapes import ModelShape
from hf_distca.run import STRATEGIES, RunSpec

MODEL = ModelShape.llama(2, 64, 160, 4, 2, 100)


@pytest.mark.parametrize(("given", "chunk"), [("auto", 0), (0, 0), (4, 4)])
def test_rows_of_mlps_are_those_of_the_settings_and_all_for_auto(given, chunk):
    run = RunSpec.of(DistCAConfig(tokens_per_rank=8, mlp_chunk_rows=given), MODEL, ranks=2)
    assert (run.mlp_chunk_rows, run.plans.rows_per_rank) == (chunk, 8)


def test_float32_weights_are_autocast_under_ddp_alone():
    run = RunSpec.of(DistCAConfig(), MODEL, ranks=2, mixed=True)
    cast = [strategy for strategy in STRATEGIES if replace(run, strategy=strategy).autocasts]
    assert cast == ["ddp"]
    assert not replace(run, mixed=False).autocasts


@pytest.mark.parametrize("ranks", [1, 2])
def test_plans_are_chosen_by_costs_where_there_are_ranks_to_choose_for(ranks):
    profile = DeviceProfile.load("cpu")
    run = RunSpec.of(DistCAConfig(), MODEL, ranks=ranks, profile=profile)
    assert run.device == profile
    assert (run.plans.costs is not None) == (ranks == 2)
