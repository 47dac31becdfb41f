import gc
import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.ranks import (
    EARLIER_NAMES,
    RankPool,
    backward_in_a_thread,
    poison_unsent_numbers,
    with_backward_in_a_thread,
)

POOLS = {"rank_pools", "zero_pools"}
"""Fixtures that start ranks: tests that take them launch."""

# Before torch is imported: idle threads of one process keep cores from others.
os.environ["OMP_NUM_THREADS"] = "1"
# Before huggingface_hub is imported: it would ask a Hub that cannot be reached again for 23 s.
os.environ["HF_HUB_OFFLINE"] = "1"

# The time of an example shows how busy the machine is.
settings.register_profile("hf_distca", deadline=None)
settings.load_profile("hf_distca")


# Of a module: ranks start in 0.1 s, and threads of their groups poll while they live.
@pytest.fixture(scope="module")
def rank_pools() -> Iterator[dict[int, RankPool]]:
    """Pools of 1 to 4 ranks; each starts when it is first used."""
    pools = {size: RankPool(size) for size in (1, 2, 3, 4)}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def backward_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run every backward in a thread of its own, here and on `rank_pools`, as on a GPU."""
    run = RankPool.run
    monkeypatch.setattr(
        RankPool,
        "run",
        lambda pool, *args, **options: run(pool, with_backward_in_a_thread, *args, **options),
    )
    with backward_in_a_thread():
        yield


def pytest_configure(config: pytest.Config) -> None:
    """Let a test fail where transformers warns of an earlier name of activation checkpointing."""
    config.addinivalue_line("filterwarnings", f"error:{EARLIER_NAMES}:FutureWarning")


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests with pools of ranks, and put files that launch first, the trainer's before others:
    one taken last would leave the other workers idle.
    """
    for item in items:
        if not POOLS.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker("launches")
    launching = {item.path for item in items if item.get_closest_marker("launches")}
    items.sort(key=lambda item: (item.path not in launching, "trainer" not in item.path.parts))


@pytest.fixture(scope="module")
def zero_pools() -> Iterator[dict[str, RankPool]]:
    """Pools of 2 ranks for ZeRO-2 and ZeRO-3, of which DeepSpeed keeps the groups."""
    pools = {"zero2": RankPool(2), "zero3": RankPool(2)}
    yield pools
    for pool in pools.values():
        pool.close()


def pytest_collection_finish() -> None:
    """Poison row numbers that are never sent, where tests have imported torch.

    Keep imported objects out of garbage collections, of which each trainer makes several.
    """
    if "hf_distca.dispatch.rows" in sys.modules:
        poison_unsent_numbers()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the last collection see all objects again: libraries warn of objects that are left when
    Python ends.
    """
    gc.unfreeze()
