"""What rows take in a simulation, from shapes: three layers of two query heads and one key-value head of 4 numbers."""

from dataclasses import replace

from hf_distca.memory.simulated import LeastMemory
from hf_distca.sim.ways import ways_to_train
from tests.sim.test_simulate import SETTINGS, SETUP


def test_the_least_memory():
    memory = LeastMemory(SETUP)
    ways = {way.name: way for way in ways_to_train(SETUP, SETTINGS, 1)}
    rows = 8 * 3 * (8 * 4 + 2 * (4 * 4 + 4))  # of each layer its input, and O and its log-sum-exp
    state = 16 * 1000 // 2
    assert memory(ways["plain packing"], 8, None) == memory(ways["hf_distca, joint"], 8, None) == (rows, state)
    gathered = 2 * 8 * (4 + 4) * 4  # K and V of the other rank, and their gradients
    assert memory(ways["context parallel, 1 × 2"], 8, None) == (rows + gathered, state)
    assert memory(ways["hf_distca, joint, 1 servers"], 8, None) == (None, state)
    assert LeastMemory(replace(SETUP, checkpointing=False))(ways["plain packing"], 8, None) == (None, state)
