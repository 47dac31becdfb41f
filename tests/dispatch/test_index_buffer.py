import numpy as np
import pytest
import torch

from hf_distca.dispatch import rows as rows_module
from hf_distca.dispatch.rows import IndexBuffer
from tests.counting import META, Counting

NUMBERS = [np.array([3, 1, 2]), np.array([0, 5], np.int32), np.arange(0), np.arange(4)[::2]]


def test_numbers_come_back_aligned():
    buffer = IndexBuffer(torch.device("cpu"))
    placed = [buffer.place(numbers) for numbers in NUMBERS]
    buffer.send()
    assert [x.tolist() for x in placed] == [[3, 1, 2], [0, 5], [], [0, 2]]
    assert [x.dtype for x in placed] == [torch.int64, torch.int32, torch.int64, torch.int64]
    assert [x.storage_offset() * x.itemsize for x in placed] == [0, 32, 48, 48]
    assert len({x.untyped_storage().data_ptr() for x in placed}) == 1


@pytest.mark.parametrize(("chunk", "copies"), [(64, 1), (63, 2), (1, 4)])
def test_one_copy_where_there_is_room(monkeypatch, chunk, copies):
    monkeypatch.setattr(rows_module, "CHUNK_BYTES", chunk)
    buffer = IndexBuffer(META)
    with Counting() as mode:
        placed = [buffer.place(np.arange(2)) for _ in range(4)]
        buffer.send()
        buffer.send()
    assert [x.shape for x in placed] == [(2,)] * 4
    assert [call.name for call in mode.calls if call.what == "copy"] == ["copy_"] * copies


def test_what_is_placed_after_sending_lies_elsewhere():
    buffer = IndexBuffer(torch.device("cpu"))
    first = buffer.place(np.array([1]))
    buffer.send()
    buffer.place(np.array([2]))
    assert first.tolist() == [1]


def test_another_is_used_alike():
    assert [IndexBuffer(device).another().in_one_go for device in (META, torch.device("cpu"))] == [True, False]
    assert IndexBuffer(torch.device("cpu"), in_one_go=True).another().in_one_go


def test_numbers_that_lie_in_another_order():
    buffer = IndexBuffer(torch.device("cpu"))
    assert buffer.place(np.arange(5)[::-1]).tolist() == [4, 3, 2, 1, 0]
    assert buffer.place(np.arange(6)[::2]).tolist() == [0, 2, 4]
