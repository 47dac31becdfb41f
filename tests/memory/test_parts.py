"""Tensors that are counted by part while they live, and a rank's state under each strategy."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig

from hf_distca.memory.live import LiveMemory
from hf_distca.memory.model_state import ModelState, model_state, parameter_bytes
from hf_distca.models.fake import fake_tensors, model_of_config
from tests.models_and_batches import SMALL, small_model

KB = 1024
LAYER = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48 + 2 * 32
OUTSIDE = 2 * 64 * 32 + 32
ALL = 2 * LAYER + OUTSIDE


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
    live = LiveMemory()
    weight = torch.empty(KB)
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


def test_the_peak_is_that_of_a_model_with_further_layers():
    """Each of 3 further layers keeps 2 KB, besides temporary tensors of its forward."""
    live = LiveMemory(repetitions=3)
    with fake_tensors(), live:
        live.repeats = True
        kept = torch.empty(2 * KB, dtype=torch.uint8)
        temporary = torch.empty(3 * KB, dtype=torch.uint8)
        assert live.peak == {"activations": 5 * KB}
        del temporary
        with live.making("exchange buffers"):
            buffer = torch.empty(KB, dtype=torch.uint8)  # the same for all layers
        live.repeats = False
        later = torch.empty(KB, dtype=torch.uint8)  # while another layer runs
        assert live.peak == {"activations": 5 * KB}
        del later
        live.layers_ended = True
        with live.making("backward"):
            more = torch.empty(4 * KB, dtype=torch.uint8)
            assert live.peak == {
                "activations": (1 + 3) * 2 * KB,
                "exchange buffers": KB,
                "backward": 4 * KB,
            }
            del kept
            most = torch.empty(7 * KB, dtype=torch.uint8)  # less than what all layers kept
    assert [len(x) for x in (buffer, more, most)] == [KB, 4 * KB, 7 * KB]
    assert live.peak["backward"] == 4 * KB


def test_what_further_layers_keep_is_on_the_host():
    """Of 5 layers, 2 are counted; the device has the checkpoints of 2, and the host of 3."""
    live = LiveMemory(repetitions=3, offloaded=3)
    with fake_tensors(), live:
        live.repeats = True
        kept = torch.empty(2 * KB, dtype=torch.uint8)
        with live.making("cast weights"):  # no part of a checkpoint
            cast = torch.empty(KB, dtype=torch.uint8)
        live.repeats, live.layers_ended = False, True
        last = torch.empty(2 * KB, dtype=torch.uint8)
    assert [len(x) for x in (kept, cast, last)] == [2 * KB, KB, 2 * KB]
    assert live.offloaded_peak == {"activations": 4 * KB, "cast weights": 4 * KB, "host": 6 * KB}
    assert live.peak == {"activations": 10 * KB, "cast weights": 4 * KB}


def test_weights_that_autocast_copies():
    live = LiveMemory()
    mode = fake_tensors()
    with mode:
        linear = torch.nn.Linear(8, 16, bias=False)
    live.belong(linear.parameters(), "weights")
    with mode, live, torch.autocast("cpu", torch.bfloat16):
        assert linear(torch.empty(4, 8)).dtype == torch.bfloat16
    assert live.peak["weights"] == 8 * 16 * 4
    assert live.peak["cast weights"] == 8 * 16 * 2


def test_parameters_are_counted_once_and_quantized_weights_as_they_are():
    tied = model_of_config(
        AutoConfig.for_model("llama", **SMALL, tie_word_embeddings=True), torch.bfloat16
    )
    assert parameter_bytes(tied) == 2 * (ALL - 64 * 32)
    assert parameter_bytes(tied, 4) == 4 * (ALL - 64 * 32)
    packed = torch.nn.Linear(8, 4, bias=False)  # 32 numbers, two in a byte
    packed.weight = torch.nn.Parameter(torch.zeros(16, 1, dtype=torch.uint8), requires_grad=False)
    assert parameter_bytes(packed) == 16
    assert parameter_bytes(packed, 4) == 16
    assert parameter_bytes(packed, trained=True) == 0


GATHERED = OUTSIDE + 2 * LAYER
REDUCED = OUTSIDE + LAYER
SHARE = ALL // 2


def test_only_what_is_trained_has_a_gradient():
    lora = get_peft_model(small_model(), LoraConfig(r=4, target_modules=["q_proj"]))
    trained = 2 * 2 * 4 * 32  # two matrices of rank 4 for 32 inputs and 32 outputs in two layers
    assert model_state(lora, "ddp", 1, mixed=True) == ModelState(
        4 * (ALL + trained), 4 * trained, 8 * trained
    )


@pytest.mark.parametrize(
    ("strategy", "ranks", "mixed", "weights", "gradients", "optimizer"),
    [
        ("ddp", 1, True, 4 * ALL, 4 * ALL, 8 * ALL),
        ("ddp", 2, True, 4 * ALL, 8 * ALL, 8 * ALL),
        ("fsdp2", 2, True, 4 * SHARE + 2 * GATHERED, 4 * SHARE + 2 * REDUCED, 8 * SHARE),
        ("fsdp2", 2, False, 4 * (SHARE + GATHERED), 4 * (SHARE + REDUCED), 8 * SHARE),
        ("zero1", 2, True, 2 * ALL, 2 * ALL, 12 * SHARE),
        ("zero2", 2, True, 2 * ALL, 2 * (SHARE + REDUCED), 12 * SHARE),
        ("zero3", 2, True, 2 * (SHARE + GATHERED), 2 * (SHARE + REDUCED), 12 * SHARE),
    ],
    ids=["one rank", "ddp", "fsdp2", "fsdp2 in float32", "zero1", "zero2", "zero3"],
)
def test_state_by_strategy(strategy, ranks, mixed, weights, gradients, optimizer):
    state = model_state(small_model(), strategy, ranks, mixed=mixed)
    assert state.weights == weights
    assert state.gradients == gradients
    assert state.optimizer == optimizer
