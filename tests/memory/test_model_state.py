import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig

from hf_distca.memory.model_state import ModelState, model_state, parameter_bytes
from hf_distca.models.fake import model_of_config
from tests.models_and_batches import SMALL, small_model

LAYER = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48 + 2 * 32
OUTSIDE = 2 * 64 * 32 + 32
ALL = 2 * LAYER + OUTSIDE


def model():
    return model_of_config(AutoConfig.for_model("llama", **SMALL), torch.float32)


def test_parameters_are_counted_once_and_quantized_weights_as_they_are():
    assert parameter_bytes(model()) == 4 * ALL
    tied = model_of_config(AutoConfig.for_model("llama", **SMALL, tie_word_embeddings=True), torch.bfloat16)
    assert parameter_bytes(tied) == 2 * (ALL - 64 * 32)
    assert parameter_bytes(tied, 4) == 4 * (ALL - 64 * 32)
    packed = torch.nn.Linear(8, 4, bias=False)  # 32 numbers, two in a byte
    packed.weight = torch.nn.Parameter(torch.zeros(16, 1, dtype=torch.uint8), requires_grad=False)
    assert (parameter_bytes(packed), parameter_bytes(packed, 4), parameter_bytes(packed, trained=True)) == (16, 16, 0)


def test_by_strategy():
    def state(strategy, ranks, mixed):
        return model_state(model(), strategy, ranks, mixed=mixed)

    assert state("ddp", 1, True) == ModelState(4 * ALL, 4 * ALL, 8 * ALL)
    assert state("ddp", 2, True) == ModelState(4 * ALL, 8 * ALL, 8 * ALL)
    gathered, reduced, share = OUTSIDE + 2 * LAYER, OUTSIDE + LAYER, ALL // 2
    assert state("fsdp2", 2, True) == ModelState(4 * share + 2 * gathered, 4 * share + 2 * reduced, 8 * share)
    assert state("fsdp2", 2, False) == ModelState(4 * (share + gathered), 4 * (share + reduced), 8 * share)
    assert state("zero1", 2, True) == ModelState(2 * ALL, 2 * ALL, 12 * share)
    assert state("zero2", 2, True) == ModelState(2 * ALL, 2 * (share + reduced), 12 * share)
    assert state("zero3", 2, True) == ModelState(2 * (share + gathered), 2 * (share + reduced), 12 * share)


def test_only_what_is_trained_has_a_gradient():
    lora = get_peft_model(small_model(), LoraConfig(r=4, target_modules=["q_proj"]))
    trained = 2 * 2 * 4 * 32  # two matrices of rank 4 for 32 inputs and 32 outputs in two layers
    state = model_state(lora, "ddp", 1, mixed=True)
    assert state == ModelState(4 * (ALL + trained), 4 * trained, 8 * trained)
