"""Small models, and steps of them: planned, and document by document with stock attention."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.gpu.findings import StepResult
from benchmarks.gpu.setting import Setting
from benchmarks.harness.models import VOCABULARY, documents_of, rows_of_rank
from hf_distca import Dispatcher, DistCAConfig, describe_run, plan_layers
from hf_distca.plan import MicroBatchPlan

HEADS = (8, 2)
"""Query and key-value heads of a small model, by default."""
SMALL = {
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 65536,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}


def new_model(
    setting: Setting,
    implementation: str,
    model_type: str,
    dtype: torch.dtype,
    config: dict[str, Any],
) -> PreTrainedModel:
    """A model with random weights, made on the device, the same every time."""
    torch.manual_seed(0)
    # Experts one after another: the fused products of some versions take no float64.
    experts = {"experts_implementation": "eager"} if "num_local_experts" in config else {}
    with setting.device:
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(model_type, **config),
            attn_implementation=implementation,
            dtype=dtype,
            **experts,
        )
    return model.to(setting.device).train()


def small_model(
    setting: Setting,
    implementation: str,
    model_type: str = "llama",
    heads: tuple[int, int] = HEADS,
    **config: Any,
) -> PreTrainedModel:
    q_heads, kv_heads = heads
    sizes = {
        "hidden_size": q_heads * setting.head_dim,
        "intermediate_size": 2 * q_heads * setting.head_dim,
        "num_attention_heads": q_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": setting.head_dim,
    }
    return new_model(
        setting, implementation, model_type, torch.float32, {**SMALL, **sizes, **config}
    )


def dispatcher_of(
    model: PreTrainedModel, setting: Setting, *, ping_pong: bool, ranks: int = 1, **options: Any
) -> Dispatcher:
    """A dispatcher; prepares the model's layers too.

    On one rank there may be two nano-batches as well.
    """
    # Cuts fall on multiples of a kernel's block, or less where documents are tiny.
    block = 128 if max(setting.lengths) > 1024 else 8
    config = DistCAConfig(
        tokens_per_rank=2 * sum(setting.lengths), planning={"balance_block_size": block}
    )
    settings = describe_run(
        model, config, ranks=ranks, device=setting.device, dtype=setting.dtype
    ).plans
    if ping_pong:
        plan_layers(model)
    return Dispatcher(replace(settings, ping_pong=ping_pong), setting.device, **options)


def planned_loss(
    model: PreTrainedModel,
    plan: MicroBatchPlan,
    dispatcher: Dispatcher,
    documents: Sequence[Tensor],
) -> Tensor:
    """This rank's share of the loss over all targets, planned; raises if the model did not follow
    the plan.
    """
    batch = rows_of_rank(plan, dispatcher.groups.rank, documents, dispatcher.device)
    bound = dispatcher.bind(plan)
    loss: Tensor = model(**batch, num_items_in_batch=targets_of(documents), distca_plan=bound).loss
    if not bound.ran.attentions:
        raise RuntimeError("the plan reached no attention layer")
    # Where nothing moves, as on one rank, there are no turns.
    if (
        len(plan.nano_batches) == 2
        and bound.exchanges
        and bound.ran.layers_in_turns != bound.ran.layers
    ):
        raise RuntimeError(
            f"only {bound.ran.layers_in_turns} of {bound.ran.layers} layers ran their halves in "
            "turns"
        )
    return loss


def stock_step(model: PreTrainedModel, documents: Sequence[Tensor]) -> float:
    """Forward and backward, one document after another; returns the loss over all targets."""
    targets, total = targets_of(documents), 0.0
    for document in documents:
        if len(document) > 1:
            tokens = document.to(model.device)
            logits = (
                model(input_ids=tokens[None])
                .logits[0, :-1]
                .to(torch.promote_types(model.dtype, torch.float32))
            )
            loss = cross_entropy(logits, tokens[1:], reduction="sum") / targets
            loss.backward()
            total += loss.item()
    return total


def stock_result(
    setting: Setting,
    implementation: str,
    *,
    exact: bool = False,
    model_type: str = "llama",
    **config: Any,
) -> StepResult:
    """A step with stock attention, in the usual precision or a higher one."""
    model = small_model(setting, implementation, model_type, **config)
    if exact:
        loss = stock_step(model.to(setting.exact), documents_of(setting.lengths))
    else:
        with setting.autocast():
            loss = stock_step(model, documents_of(setting.lengths))
    return StepResult(loss, gradients(model))


def targets_of(documents: Sequence[Tensor]) -> int:
    return sum(max(len(document) - 1, 0) for document in documents)


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """Gradients by parameter, on the CPU; the model has none afterwards."""
    grads = {
        name: p.grad.double().cpu() for name, p in model.named_parameters() if p.grad is not None
    }
    model.zero_grad()
    return grads
