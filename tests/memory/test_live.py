import torch

from hf_distca.memory.live import LiveMemory
from hf_distca.models.fake import fake_tensors

KB = 1024


def test_bytes_by_part_when_they_are_the_most():
    live = LiveMemory()
    with fake_tensors(), live:
        kept = torch.empty(KB)
        with live.making("loss"):
            first = torch.empty(2 * KB)
            del first
            second = torch.empty(3 * KB)
        view = kept[:10].view(2, 5)
        del second, kept
        torch.empty(KB)
    assert view.shape == (2, 5)
    assert live.peak == {"activations": 4 * KB, "loss": 12 * KB}


def test_tensors_of_another_part_and_tensors_on_the_host():
    live, weight = LiveMemory(), torch.empty(KB)
    live.belong([weight], "weights")
    with live:
        result = torch.empty(KB)
        live.belong([result, weight], "gradients")
        live.begin()
        assert live.peak == {"weights": 0, "activations": 0, "gradients": 8 * KB}
        with live.making("host"):
            away = torch.empty(100 * KB)  # takes nothing of the device
        del away
        more = torch.empty(KB)
    assert more.shape == (KB,)
    assert live.peak == {"weights": 0, "activations": 4 * KB, "gradients": 8 * KB, "host": 0}


def test_weights_that_autocast_copies():
    live, mode = LiveMemory(), fake_tensors()
    with mode:
        linear = torch.nn.Linear(8, 16, bias=False)
    live.belong(linear.parameters(), "weights")
    with mode, live, torch.autocast("cpu", torch.bfloat16):
        out = linear(torch.empty(4, 8))
    assert out.dtype == torch.bfloat16
    assert live.peak["weights"] == 8 * 16 * 4
    assert live.peak["cast weights"] == 8 * 16 * 2
