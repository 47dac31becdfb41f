"""What a planned layer launches, copies and moves on a GPU, counted on meta tensors: see
`tests.counting`.
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from hf_distca.dispatch.bound import BoundPlan
from hf_distca.dispatch.executor import CoreAttention
from hf_distca.kernels import AttentionParams, get_kernel
from hf_distca.models.checkpointing import enable_checkpointing
from hf_distca.models.kinds import layers_by_kind
from hf_distca.patches.layers import plan_layers
from hf_distca.plan import MicroBatchPlan
from hf_distca.planner.micro_batch import plan_micro_batch, plan_placed
from hf_distca.planner.settings import PlanSettings
from tests.counting import (
    FIGURES,
    META,
    Counting,
    MetaKernel,
    bound_plan,
    counted,
    empty_model,
    fake_group,
    figures_of,
    without_numbers,
)
from tests.models_and_batches import SMALL_KIND, in_nodes, in_stages

RANKS, RANK = 4, 1
LENGTHS = [700, 300, 200, 200, 130, 111, 100, 90, 60, 50, 40, 37, 20, 10]
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "vocab_size": 64,
    "pad_token_id": 0,
}
SLIDING = {
    "num_hidden_layers": 5,
    "sliding_window": 96,
    "layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"],
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
FEW_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = {  # the first four with heads as in real models; everything else is small
    "llama": {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    "qwen2": {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2},
    "gpt_oss": {
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        **EXPERTS,
        **SLIDING,
    },
    "gemma3_text": {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, **SLIDING},
    "mistral": {**FEW_HEADS, "sliding_window": 96},
    "mixtral": {**FEW_HEADS, **EXPERTS, "sliding_window": None},
    "olmo2": FEW_HEADS,
    "phi3": {**FEW_HEADS, "sliding_window": None},
}


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    with fake_group(RANKS) as group:
        yield group


def made(model_type: str, device: torch.device = META) -> PreTrainedModel:
    """A model of MODELS, with "+lora" one with adapters; to be made inside `without_numbers`, as
    plans and steps.
    """
    model_type, *lora = model_type.split("+")
    model = empty_model(model_type, device, **{**SMALL, **MODELS[model_type]})
    if lora:
        model = get_peft_model(
            model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        )
        model.enable_input_require_grads()
    return model


def planned(model, layout, turns, stage_rows=None, nodes=None) -> MicroBatchPlan:
    options = {
        "balance_block_size": 16,
        "row_overhead": MetaKernel.row_overhead,
        "ping_pong": turns,
    }
    kinds, tokens = tuple(layers_by_kind(model)), sum(LENGTHS) // RANKS
    plan = plan_micro_batch(
        LENGTHS, PlanSettings(RANKS, tokens, kinds, document_layout=layout, **options)
    )
    assert len(plan.nano_batches) == 1 + turns
    return in_nodes(in_stages(plan, stage_rows), nodes)


def counted_step(model: PreTrainedModel, bound: BoundPlan, checkpoint: str = "none") -> Counting:
    if len(bound.nano_batches) > 1:
        plan_layers(model)
    if checkpoint != "none":
        enable_checkpointing(model, {"use_reentrant": checkpoint == "reentrant"})
    return counted(model, bound)


# Of one layer and step, forward and backward, on one of 4 ranks. "kernels" are calls of the
# attention kernel, "exchange" are calls that begin an exchange.
# K/V rows come in one stage or four, seven in all with two nano-batches; on two nodes in two hops
# each, four and six stages.
BOUNDS = """
model       layer   layout halves checkpoint    stages launches copies views kernels exchange     KB
llama       full    auto   1      none          one          17     11    42       5        7  44565
llama       full    fixed  1      none          one          22     16    45       5        7  39030
llama       full    auto   2      none          one          52     40    62       8       14  91308
llama+lora  full    auto   2      none          one          52     40    62       8       14  91308
llama       full    fixed  2      none          one          60     48    68      10       14  91011
llama       full    auto   1      reentrant     one          17     11    50       5        7  44565
llama       full    auto   2      non-reentrant one          52     40    94       8       14  91308
llama       full    auto   2      reentrant     one          53     41    83       8       14  91439
qwen2       full    auto   2      none          one          52     40    62       8       14  19926
gpt_oss     full    auto   1      none          one          41     24    43       5        7 140596
gpt_oss     sliding auto   1      none          one          54     38    92       5        7 138325
gpt_oss     full    auto   2      none          one          93     58    64       8       14 173837
gpt_oss     sliding auto   2      none          one         105     72   169       8       14 152384
gpt_oss     full    fixed  2      none          one          96     61    81      10       14 175501
gpt_oss     sliding fixed  2      none          one          88     55   176       8       14 133870
gpt_oss     full    auto   2      non-reentrant one          93     58   100       8       14 173837
gpt_oss     sliding auto   2      non-reentrant one         105     72   205       8       14 152384
gemma3_text full    fixed  2      none          one          60     48    68      10       14  21575
gemma3_text sliding fixed  2      none          one          43     33   174       8       14  11016
gemma3_text full    auto   2      reentrant     one          53     41    83       8       14  23177
gemma3_text sliding auto   2      reentrant     one          65     55   188       8       14  20410
llama       full    auto   1      none          four         73     40    69      11       16 173294
llama       full    auto   2      none          four        155    104   100      18       29 260116
gpt_oss     full    auto   1      none          four        103     59    70      11       16 271085
gpt_oss     sliding auto   1      none          four        124     78   227      13       19 188071
llama       full    auto   1      none          hops         97     56    93      11       28 176388
llama       full    auto   2      none          hops        164    111   119      16       44 255884
"""
ROWS = [line.split() for line in BOUNDS.strip().splitlines()[1:]]
CASES = list(dict.fromkeys((row[0], *row[2:6]) for row in ROWS))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_layer(group, case):
    """What dispatch costs an inner layer does not creep up; nothing waits; binding is one copy of
    all numbers.
    """
    model_type, layout, halves, checkpoint, stages = case
    nodes, stage_rows = (0, 0, 1, 1) if stages == "hops" else None, None if stages == "one" else 200
    with without_numbers():
        model = made(model_type)
        plan = planned(model, layout, halves == "2", stage_rows, nodes)
        with Counting() as binding:
            bound = bound_plan(plan, RANK, group)
        mode = counted_step(model, bound, checkpoint)
    assert [call.name for call in binding.calls if call.launches] == ["copy_"]
    assert binding.calls[-1].moved > 1000
    assert bound.ran.layers_in_turns == (halves == "2") * bound.ran.layers
    layers = {call.layer for call in mode.calls if call.layer is not None}
    for kind, bounds in (
        (row[1], tuple(map(int, row[6:]))) for row in ROWS if (row[0], *row[2:6]) == case
    ):
        # A layer that is not among the first to run in a direction: these make the buffers that all
        # layers use.
        first, last = (1, 1) if kind == "sliding" else (0, max(layers))
        of_layer = [
            c
            for c in mode.calls
            if c.owner == "dispatch" and c.layer == (first if c.backward else last)
        ]
        figures = figures_of(of_layer)
        counts = *(figures[name] for name in FIGURES[:-1]), -(-figures["moved"] // 1000)
        exceeded = any(count > bound for count, bound in zip(counts, bounds, strict=True))
        assert not exceeded, f"counted {counts}, at most {bounds}"


def besides_views(mode: Counting, layer: int) -> Counter[str]:
    return figures_of(
        [c for c in mode.calls if c.owner == "dispatch" and c.layer == layer and c.what != "view"]
    )


@pytest.mark.parametrize(
    ("model_type", "checkpoint", "turns"),
    [
        ("llama", "none", False),
        ("llama", "reentrant", True),
        ("llama+lora", "non-reentrant", True),
        ("gemma3_text", "none", True),
        ("gemma3_text", "non-reentrant", False),
    ],
)
def test_where_nothing_moves_a_layer_is_one_kernel_call_each_way(
    group, monkeypatch, model_type, checkpoint, turns
):
    """With no launch, copy, gather, merge or exchange besides; without routes, and bound by one
    copy.
    """
    monkeypatch.setattr(
        "hf_distca.dispatch.bound.make_routes", lambda *_: pytest.fail("made routes")
    )
    monkeypatch.setattr(
        "hf_distca.dispatch.exchange.Exchange.buffer", lambda *_: pytest.fail("took a buffer")
    )
    with without_numbers():
        model = made(model_type)
        plan_layers(model)
        options = {"balance_tolerance": 0.3, "ping_pong": turns}
        plan = plan_placed(
            [[160, 96]] * RANKS, PlanSettings(RANKS, 2048, tuple(layers_by_kind(model)), **options)
        )
        with Counting() as binding:
            bound = bound_plan(plan, RANK, group)
        mode = counted_step(model, bound, checkpoint)
    assert len(plan.nano_batches) == 1 + turns
    assert [call.name for call in binding.calls if call.launches] == ["copy_"]
    full, window = (160 * 161 + 96 * 97) // 2, 96 * 97 // 2 * 2 + 64 * 96
    for kind, tasks in bound.local.items():
        assert sorted(tasks.shapes.q_lens) == [96, 160]
        assert tasks.pairs == {None: full, 96: window}[kind.window]
    layers = model.config.num_hidden_layers
    # In the last layer of each kind, whose backward is the first, the kernel makes a tensor that it
    # uses again.
    inner = layers - len(bound.local)
    assert [besides_views(mode, layer) for layer in range(inner)] == [{"attention": 2}] * inner
    assert len(bound.kept_results) == 0
    assert (bound.ran.layers, bound.ran.layers_in_turns) == (
        layers * (1 if checkpoint == "none" else 2),
        0,
    )
    if (model_type, checkpoint) == ("llama", "none"):
        # Q, K, V and O as the model has them, [B, H, T, D], and as kernels take them, in both
        # directions; two of LSE, of the kernel; two of O, of autograd, which has it as a result.
        views = Counter(
            c.name
            for c in mode.calls
            if c.owner == "dispatch" and c.layer == 1 and c.what == "view"
        )
        assert views == {"squeeze": 4, "transpose": 6, "unsqueeze": 4, "permute": 2, "detach": 2}
        with without_numbers():  # results that are not kept are computed again
            model, bound = made("llama"), bound_plan(plan, RANK, group)
            monkeypatch.setattr(bound.kept_results, "keep", lambda *_: None)
            assert besides_views(counted_step(model, bound, "non-reentrant"), 1) == {"attention": 3}


def test_memory_of_a_direction_ends_with_it(group):
    """That of a backward's inputs ends before: while the last rows travel."""
    settings = PlanSettings(RANKS, 1024, (SMALL_KIND,), balance_block_size=16)
    with without_numbers():
        bound = bound_plan(plan_micro_batch(LENGTHS, settings), RANK, group)
        (nano_batch,) = bound.nano_batches
        core = CoreAttention(bound.runtime, nano_batch, SMALL_KIND, AttentionParams(1.0))
        q, k, v = (
            torch.empty(bound.rows, heads, 8, dtype=torch.bfloat16, device=META)
            for heads in (4, 2, 2)
        )
        core.begin("forward", q, k, v)
        forward = weakref.ref(core.running)
        core.running.go_on()
        o, lse = core.end()
        assert forward() is None
        do = torch.empty_like(o)
        core.begin("backward", do, q, k, v, o, lse)
        backward = weakref.ref(core.running)
        inputs = weakref.ref(do)
        del do
        core.running.go_on()
        assert inputs() is None
        assert [x.shape for x in core.end()] == [q.shape, k.shape, v.shape]
        assert backward() is None


CUDA = torch.device("cuda", 0)


def event(**_: Any) -> SimpleNamespace:
    """`torch.cuda.Event`, of a device on which everything is over at once."""
    done = dict.fromkeys(("record", "synchronize"), lambda: None)
    return SimpleNamespace(**done, query=lambda: True, elapsed_time=lambda _after: 0.0)


@pytest.mark.cuda_build
@pytest.mark.skipif(
    not torch.backends.cuda.is_built() or torch.cuda.is_available(),
    reason="needs torch's CUDA build, and no GPU: where there is one, make gpu shows more",
)
@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize(
    ("layout", "turns", "checkpoint", "stage_rows"),
    [
        ("auto", False, "none", None),
        ("fixed", True, "none", None),
        ("auto", True, "non-reentrant", None),
        ("auto", True, "reentrant", None),
        ("auto", False, "none", 200),
        ("fixed", True, "non-reentrant", 100),
    ],
)
def test_step_on_fake_cuda(group, monkeypatch, model_type, layout, turns, checkpoint, stage_rows):
    """As the CUDA build runs a step: every branch for CUDA; streams, events and pinned memory are
    stand-ins.
    """
    monkeypatch.setattr("torch.cuda.Event", event)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _device: (9, 0))
    assert get_kernel("auto", CUDA).name == "torch_varlen"
    with without_numbers(CUDA):
        model = made(model_type, CUDA)
        bound = bound_plan(planned(model, layout, turns, stage_rows), RANK, group, CUDA)
        mode = counted_step(model, bound, checkpoint)
    kinds = {call.what for call in mode.calls if call.owner == "dispatch"}
    assert {"attention", "exchange", "copy", "view"} <= kinds
    assert all(parameter.grad.device == CUDA for parameter in model.model.layers.parameters())
