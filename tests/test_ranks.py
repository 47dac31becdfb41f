"""Pools of ranks of tests."""

from multiprocessing import Pipe
from unittest.mock import Mock

import pytest

from tests.ranks import RankPool


def test_an_interrupted_run_leaves_no_answer_to_the_next_one(monkeypatch):
    pool = RankPool(1)
    of_pool, of_rank = Pipe()
    process = Mock()
    pool._connections, pool._processes = [of_pool], [process]
    monkeypatch.setattr("tests.ranks.wait", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        pool.run(len, "a test that takes too long")
    assert of_rank.recv() == (len, ("a test that takes too long",), False)
    process.kill.assert_called_once()
    assert pool._connections == pool._processes == []
