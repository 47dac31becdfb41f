import gc
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.browser import Browser
from tests.ranks import RankPool

# How long an example takes says how busy the machine is.
settings.register_profile("hf_distca", deadline=None)
settings.load_profile("hf_distca")


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[dict[int, RankPool]]:
    """Pools of 1 to 4 ranks; each starts when it is first used."""
    pools = {size: RankPool(size) for size in (1, 2, 3, 4)}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser with one page; for tests that `needs_chromium` marks."""
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def pytest_collection_finish() -> None:
    """Leave all that was imported out of garbage collections, of which each trainer makes several."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter's end collect it: libraries complain of what is left."""
    gc.unfreeze()
