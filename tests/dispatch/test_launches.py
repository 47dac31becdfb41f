"""What a planned layer launches, copies and moves on a GPU, counted on meta tensors: see `tests.counting`."""

import pytest
import torch

from tests.counting import META, Counting, Sums


def test_counter():
    """Every kind of operator, with what it reads and writes."""
    x = torch.empty(4, 8, device=META, requires_grad=True)
    rows = torch.empty(2, dtype=torch.int64, device=META)
    with Counting() as mode:
        y = x[1:] * 2  # reads and writes 24 numbers
        y.T.contiguous()  # 24 and 24
        torch.empty(5, device=META)
        torch.cat([y, y[:0]])  # 24 and 24
        x.detach().index_select(0, rows)  # 16 and 16, and the rows
        x.detach()[:0].clone()
        torch.mm(x.detach(), x.detach().T)
        forward = len(mode.calls)
        y.backward(torch.empty(3, 8, device=META))  # the product reads 24 and writes 24; the slice writes 32, then 24
    assert [call.name for call in mode.calls if call.what == "copy"] == [
        "clone",
        "cat",
        "index_select",
        "slice_backward",
    ]
    assert Sums.of(mode.calls[:forward]) == Sums(launches=4, copies=3, views=9, gemms=1, moved=4 * (3 * 48 + 32) + 16)
    assert Sums.of(mode.calls[forward:]) == Sums(launches=3, copies=1, views=1, moved=4 * (48 + 24 + 24 + 32))


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x.cpu(),
        lambda x: x[x > 0],
        lambda x: torch.empty(3).copy_(x),
    ],
)
def test_waits_are_refused(waits):
    with Counting(), pytest.raises(AssertionError, match="makes the host wait for the device"):
        waits(torch.empty(3, device=META))
