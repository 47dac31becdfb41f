"""What a planned layer launches, copies and moves on a GPU, counted on meta tensors: see `tests.counting`."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from hf_distca.patches.kinds import attention_kinds
from hf_distca.patches.layers import plan_layers
from hf_distca.plan import MicroBatchPlan
from hf_distca.planner.micro_batch import PlanSettings, plan_micro_batch
from tests.counting import (
    META,
    Counting,
    MetaKernel,
    Sums,
    bound_plan,
    counted,
    empty_model,
    fake_group,
    without_numbers,
)

CPU = torch.device("cpu")
RANKS, RANK, BLOCK = 4, 1, 16
LENGTHS = [700, 300, 200, 200, 130, 111, 100, 90, 60, 50, 40, 37, 20, 10]
SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "pad_token_id": 0}
SLIDING = {
    "num_hidden_layers": 3,
    "sliding_window": 96,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
}
MODELS = {
    "llama": {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    "qwen2": {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2},
    "gpt_oss": {
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    }
    | SLIDING,
    "gemma3_text": {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256} | SLIDING,
}
"""Heads as in real models; everything else is small."""


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    with fake_group(RANKS) as group:
        yield group


def small_plan(model: PreTrainedModel, layout: str, turns: bool) -> MicroBatchPlan:
    settings = PlanSettings(
        RANKS,
        sum(LENGTHS) // RANKS,
        attention_kinds(model),
        document_layout=layout,
        block_size=BLOCK,
        row_overhead=MetaKernel.row_overhead,
        ping_pong=turns,
    )
    return plan_micro_batch(LENGTHS, settings)


def run(
    model: PreTrainedModel,
    group: dist.ProcessGroup,
    layout: str,
    turns: bool,
    checkpoint: str = "none",
    device: torch.device = META,
) -> tuple[Counting, MetaKernel]:
    """One step of a model; to be called inside `without_numbers`."""
    bound = bound_plan(small_plan(model, layout, turns), RANK, group, device)
    if turns:
        plan_layers(model)
    if checkpoint != "none":
        model.gradient_checkpointing_enable({"use_reentrant": checkpoint == "reentrant"})
    mode = counted(model, bound)
    assert len(bound.nano_batches) == 1 + turns
    assert bound.ran.layers_in_turns == turns * bound.ran.layers
    return mode, bound.kernel


# Of one layer and step, forward and backward, on one of 4 ranks; attention and exchanges are calls.
BOUNDS = """
model        layer    layout halves checkpoint  launches    copies     views attention exchanges        KB
llama        full     joint   1  none                  96        72       197         7         7    157219
llama        full     fixed   1  none                  66        50       130         5         7     77687
llama        full     joint   2  none                 101        80       173         8        10    111370
llama        full     fixed   2  none                 160       123       277        10        14    206602
llama        full     joint   1  non-reentrant         96        72       211         7         7    157219
llama        full     joint   1  reentrant             96        72       205         7         7    157219
llama        full     joint   2  non-reentrant        101        80       209         8        10    111370
llama        full     joint   2  reentrant            102        81       198         8        10    111501
qwen2        full     joint   1  none                  96        72       197         7         7     25751
qwen2        full     fixed   1  none                  66        50       130         5         7     15118
qwen2        full     joint   2  none                 101        80       173         8        10     28535
qwen2        full     fixed   2  none                 158       121       277        10        14     47858
gpt_oss      full     joint   1  none                 124        85       218         7         7    223623
gpt_oss      sliding  joint   1  none                 111        88       249         5         7    161234
gpt_oss      full     fixed   1  none                  90        63       171         5         7    170317
gpt_oss      sliding  fixed   1  none                  87        64       213         5         7    155103
gpt_oss      full     joint   2  none                 120        78       199         8        10    172587
gpt_oss      sliding  joint   2  none                 148       111       400        10        14    146004
gpt_oss      full     fixed   2  none                 155       100       269        10        14    243766
gpt_oss      sliding  fixed   2  none                 143       101       352         8        14    161910
gpt_oss      full     joint   2  non-reentrant        120        78       239         8        10    172587
gpt_oss      sliding  joint   2  non-reentrant        148       111       440        10        14    146004
gemma3_text  full     joint   1  none                  96        72       197         7         7     39222
gemma3_text  sliding  joint   1  none                  90        78       248         5         7     21571
gemma3_text  full     fixed   1  none                  66        50       170         5         7     19359
gemma3_text  sliding  fixed   1  none                  64        52       212         5         7     18057
gemma3_text  full     joint   2  none                 101        80       219         8        10     27833
gemma3_text  sliding  joint   2  none                 110        96       398        10        14     16828
gemma3_text  full     fixed   2  none                 124        92       301        10        14     38354
gemma3_text  sliding  fixed   2  none                  98        79       350         8        14     20815
gemma3_text  full     joint   2  reentrant            102        81       244         8        10     27964
gemma3_text  sliding  joint   2  reentrant            111        97       423        10        14     16959
"""
ROWS = [line.split() for line in BOUNDS.strip().splitlines()[1:]]
CASES = list(dict.fromkeys((row[0], *row[2:5]) for row in ROWS))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_layer(group, case):
    """What dispatch costs an inner layer does not creep up; nothing waits; kernels get rows as they need them."""
    model_type, layout, halves, checkpoint = case
    with without_numbers():
        model = empty_model(model_type, **{**SMALL, **MODELS[model_type]})
        mode, kernel = run(model, group, layout, halves == "2", checkpoint)
    check_rows(kernel)
    for kind, bounds in ((row[1], tuple(map(int, row[5:]))) for row in ROWS if (row[0], *row[2:5]) == case):
        assert_within(inner_layer(mode, kind), bounds)


def assert_within(counts: tuple[int, ...], bounds: tuple[int, ...]) -> None:
    exceeded = any(count > bound for count, bound in zip(counts, bounds, strict=True))
    assert not exceeded, f"counted {counts}, at most {bounds}"


def check_rows(kernel: MetaKernel) -> None:
    """Kernels got rows that begin at multiples of 16 bytes, the numbers of a head side by side."""
    assert {given.name for given in kernel.inputs} == {"q", "k", "v", "do", "o"}
    assert [given for given in kernel.inputs if not given.aligned] == []


def inner_layer(mode: Counting, kind: str) -> tuple[int, ...]:
    """What dispatch launches, copies, views, calls and moves (KB) in a layer of a kind that is not the first to run.

    The first also makes the buffers that all layers use: the forward is that of the last layer, the backward that of
    the first one.
    """
    numbers = {call.layer for call in mode.calls if call.layer is not None}
    first, last = (1, 1) if kind == "sliding" else (0, max(numbers))
    sums = Sums.of(
        [c for c in mode.calls if c.owner == "dispatch" and c.layer == (first if c.backward else last)],
    )
    return sums.launches, sums.copies, sums.views, sums.attention, sums.exchanges, -(-sums.moved // 1000)


@pytest.mark.parametrize(("model_type", "layout"), [("llama", "joint"), ("gemma3_text", "fixed")])
def test_binding_is_one_copy(group, model_type, layout):
    """Of all numbers of both nano-batches and all kinds of layers."""
    with without_numbers():
        model = empty_model(model_type, **{**SMALL, **MODELS[model_type]})
        plan = small_plan(model, layout, True)
        with Counting() as mode:
            bound_plan(plan, RANK, group)
    assert [call.name for call in mode.calls if call.launches] == ["copy_"]
    assert mode.calls[-1].moved > 1000


def test_lora(group):
    with without_numbers():
        model = empty_model("llama", **{**SMALL, **MODELS["llama"]})
        adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        mode, kernel = run(get_peft_model(model, adapter), group, "joint", True)
    check_rows(kernel)
    assert_within(inner_layer(mode, "full"), (101, 80, 173, 8, 10, 111370))


def test_autocast(group):
    """Weights in float32: kernels are given bfloat16 all the same. On the CPU, where sums take other operators."""
    with without_numbers(CPU):
        model = empty_model("llama", CPU, torch.float32, **{**SMALL, **MODELS["llama"]})
        with torch.autocast("cpu", torch.bfloat16):
            _, kernel = run(model, group, "joint", True, device=CPU)
    check_rows(kernel)
    assert {given.itemsize for given in kernel.inputs} == {2}
