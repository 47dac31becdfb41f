"""GPU memory of simulated strategies, beside that of a counted plan."""

from dataclasses import replace

import pytest

from hf_distca.cli.model import config_of_shape
from hf_distca.config import DistCAConfig
from hf_distca.memory.simulated import gpu_memory
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings
from hf_distca.sim.costs import DeviceProfile
from hf_distca.sim.model import ModelShape
from hf_distca.sim.strategies import Setup, all_strategies

SHAPE = ModelShape.llama(2, 64, 160, 4, 2, 100, head_dim=16)
SETTINGS = PlanSettings(2, 1024, kinds=tuple(SHAPE.layers))
SETUP = Setup(SHAPE, DeviceProfile.load("h100"), 2, 1024)
PLAIN, WHOLE, CONTEXT, FIXED, JOINT, CHOSEN, SERVERS = all_strategies(SETUP, SETTINGS, 1)


def memory_of(**changes):
    setup = replace(SETUP, **changes)
    settings = replace(SETTINGS, kinds=tuple(map(setup.on_a_gpu, SHAPE.layers)))
    return gpu_memory(setup, config_of_shape(SHAPE), settings, DistCAConfig())


def test_rows_take_memory_along_a_line():
    alone = PlanSettings(1, 1536, kinds=tuple(SHAPE.layers))
    memory = memory_of()
    rows, state = memory(PLAIN, 1536, None)
    assert rows == pytest.approx(memory(PLAIN, 1536, plan_micro_batch([1536], alone))[0], rel=0.01)
    assert memory_of(checkpointing=False)(PLAIN, 1536, None)[0] > 1.5 * rows
    gathered = 2 * 1536 * 2 * (16 + 16) * 2  # K and V of the other rank, and their gradients
    assert memory(CONTEXT, 1536, None) == (rows + gathered, state)
    assert memory(SERVERS, 1536, None) == (None, state)
    # Exchange buffers of a plan take memory.
    rows, state = memory(PLAIN, 1024, None)
    assert rows < memory(JOINT, 1024, plan_micro_batch([2048], SETTINGS))[0]
    # GPUs that share layers take less.
    shared_rows, shared_state = memory_of(tensor_parallel=2)(PLAIN, 1024, None)
    assert (shared_rows < rows, shared_state < state) == (True, True)
