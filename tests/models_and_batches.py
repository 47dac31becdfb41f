"""Small models and global batches for tests, planned steps, and the single process they are
compared with.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from hf_distca.dispatch.bound import BoundPlan
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.models.decoder import decoder_layers
from hf_distca.models.loading import auto_class
from hf_distca.models.mixing_modules import uncuttable
from hf_distca.plan import AttentionKind, MicroBatchPlan, Plan
from hf_distca.planner.settings import PlanSettings
from hf_distca.planning_settings import Planning
from hf_distca.predict.shapes import ModelShape
from hf_distca.run import RunSpec

Step = tuple[float, dict[str, Tensor]]
"""Loss and gradients."""
WRAPPERS = re.compile(r"^module\.|_orig_mod\.|_checkpoint_wrapped_module\.")

SMALL_KIND = AttentionKind(q_heads=4, kv_heads=2, dim_qk=8, dim_v=8)
SMALL_SHAPE = ModelShape.llama(2, 32, 48, 4, 2, 64, head_dim=8)
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
CHUNK_BYTES = 4 * 64 * 20
"""With the vocabulary of SMALL the loss is computed over chunks of 20 rows."""


def exchanging(model: PreTrainedModel) -> dict[str, Any]:
    """Settings under which a model's rows travel.

    By default small documents would stay where they are.
    """
    turns = bool(decoder_layers(model))
    layout = "whole" if uncuttable(model) else "fixed"
    return {"document_layout": layout, "balance_tolerance": 0.01, "ping_pong": turns}


def with_planning(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings whose members of `planning`, named one by one, are in its dictionary."""
    members = {member.name for member in fields(Planning)}
    planning = {name: value for name, value in settings.items() if name in members}
    others = {name: value for name, value in settings.items() if name not in members}
    return {**others, "planning": planning} if planning else others


def small_kinds(*windows: int | None, chunk: int | None = None) -> tuple[AttentionKind, ...]:
    """The kinds of attention of a small model with layers of these windows, by default full, and of
    these chunks.
    """
    of_chunks = [] if chunk is None else [replace(SMALL_KIND, chunk=chunk)]
    return (*of_chunks, *(replace(SMALL_KIND, window=window) for window in windows or (None,)))


def small_run(
    plans: PlanSettings | None = None, kernel: str = "torch_varlen", **facts: Any
) -> RunSpec:
    """The run of a small model: with these settings of plans and this kernel, on one rank without
    settings.
    """
    if plans is None:
        plans = PlanSettings(1, 1024, small_kinds())
    return RunSpec(replace(plans, kernel=kernel), SMALL_SHAPE, **facts)


def changed(plan: MicroBatchPlan, change: Callable[[Plan], Plan]) -> MicroBatchPlan:
    """The plan with the plans of all nano-batches and kinds of layers changed."""
    nano_batches = []
    for nano in plan.nano_batches:
        plans = {kind: change(plan_of_kind) for kind, plan_of_kind in nano.plans.items()}
        nano_batches.append(replace(nano, plans=plans))
    return replace(plan, nano_batches=tuple(nano_batches))


def in_stages(plan: MicroBatchPlan, stage_rows: int | None) -> MicroBatchPlan:
    """The plan with so many K/V rows a rank and stage, None for one stage."""
    return changed(plan, lambda of_kind: replace(of_kind, stage_rows=stage_rows))


def in_nodes(plan: MicroBatchPlan, nodes: tuple[int, ...] | None) -> MicroBatchPlan:
    """The plan whose K/V rows are passed on inside these nodes, None for all directly."""
    return changed(plan, lambda of_kind: replace(of_kind, nodes=nodes))


SMALL_LLAMA4 = {
    "attention_chunk_size": 24,
    "floor_scale": 40,
    "layer_types": ["chunked_attention", "full_attention"],
    "no_rope_layers": [1, 0],
    "intermediate_size_mlp": 48,
    "num_local_experts": 2,
}
"""Besides SMALL: a layer in chunks, and one whose queries are scaled by their position."""
SMALL_HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    "num_experts": 4,
}
"""Besides SMALL, for qwen3_next: a layer with a gated delta rule, and one with attention."""


def small_model(
    model_type: str = "llama", implementation: str = "distca", **config: Any
) -> PreTrainedModel:
    """A randomly initialised model, the same every time."""
    torch.manual_seed(0)
    settings = AutoConfig.for_model(model_type, **{**SMALL, **config})
    model: PreTrainedModel = auto_class(settings).from_config(
        settings, attn_implementation=implementation
    )
    return model


def with_lora(model: PreTrainedModel) -> PreTrainedModel:
    torch.manual_seed(0)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, settings)


def dispatcher_of_all_ranks(**settings: Any) -> Dispatcher:
    settings = {
        "rows_per_rank": 4096,
        "balance_block_size": 8,
        "kinds": small_kinds(),
        **settings,
    }
    return Dispatcher(PlanSettings(ranks=dist.get_world_size(), **settings), torch.device("cpu"))


def random_documents(lengths: Sequence[int], vocab_size: int = 64) -> list[Tensor]:
    """Token ids [length] of each document, the same every time."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocab_size, (length,), generator=generator) for length in lengths]


def cut_rows(plan: MicroBatchPlan, rank: int, documents: Sequence[Tensor]) -> dict[str, Tensor]:
    """The rows of one rank of a plan."""
    segments = list(plan.held_by(rank))
    targets = [torch.cat([document[1:], torch.tensor([-100])]) for document in documents]
    batch = {
        "input_ids": [documents[number][start:stop] for number, start, stop in segments],
        "position_ids": [torch.arange(start, stop) for _, start, stop in segments],
        "shift_labels": [targets[number][start:stop] for number, start, stop in segments],
    }
    return {name: torch.cat(parts)[None] for name, parts in batch.items()}


def planned_step(model: nn.Module, bound: BoundPlan, documents: Sequence[Tensor]) -> Step:
    """Forward and backward of this rank's rows; the loss and gradients of all ranks."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    batch = cut_rows(bound.plan, rank, documents)
    targets = sum(max(len(document) - 1, 0) for document in documents)
    loss = model(
        **batch, labels=batch["shift_labels"], num_items_in_batch=targets, distca_plan=bound
    ).loss
    loss.backward()
    return summed_step(model, loss)


def summed_step(model: nn.Module, loss: Tensor) -> Step:
    """The sum over ranks of a loss, and of the gradients of its backward."""
    total = loss.detach().clone()
    if dist.get_world_size() > 1:
        for tensor in (total, *(p.grad for p in model.parameters() if p.requires_grad)):
            dist.all_reduce(tensor)
    return total.item(), gradients_of(model)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Gradients by the names of parameters, without what DDP, compilation and checkpoints put
    before these.
    """
    named = ((WRAPPERS.sub("", name), p.grad) for name, p in model.named_parameters())
    return {name: gradient.clone() for name, gradient in named if gradient is not None}


def reference_step(model: PreTrainedModel, documents: Sequence[Tensor]) -> Step:
    """Loss over all targets of the documents, and every parameter's gradient, in one process,
    document by document.

    Short documents come first: a rotary embedding of dynamic NTK remembers the longest document.
    """
    documents = sorted((document for document in documents if len(document) > 1), key=len)
    targets = sum(len(document) - 1 for document in documents)
    total = 0.0
    model.zero_grad()
    for document in documents:
        logits = model(input_ids=document[None]).logits[0, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits, document[1:], reduction="sum") / targets
        loss.backward()
        total += loss.item()
    return total, gradients_of(model)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Largest deviation over the largest expected magnitude."""
    return ((got - expected).abs().max() / expected.abs().max().clamp_min(1e-12)).item()


def assert_same_step(got: Step, expected: Step) -> None:
    assert got[0] == pytest.approx(expected[0], rel=1e-6)
    assert got[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert relative_error(got[1][name], gradient) < 1e-5, name
