"""What becomes of a causal language model of transformers, tiny, on two ranks with ping-pong: equal or refused."""

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_distca.config import DistCAConfig
from hf_distca.patches.model import check_loss, plan_settings
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.trainer.assembly import make_dispatcher
from tests.dispatch.test_equality import cut_rows
from tests.models import random_documents, reference_step
from tests.survey.tiny import tiny_config

LENGTHS = (40, 7, 33, 1, 26, 12, 1)
CONFIG = DistCAConfig(tokens_per_rank=64, balance_block_size=4, exchange_timeout=20.0, loss_chunk_bytes=4 * 64 * 20)
NEGLIGIBLE = 1e-3
"""Gradients of a tensor below this share of the model's largest are compared with that: theirs are rounding errors."""
ACCEPTED = 1e-4
"""Of the loss, and of a gradient, by the largest value of its tensor."""
Status = Literal["equal", "refused", "not built", "wrong", "unclear error"]


@dataclass(frozen=True)
class Outcome:
    """Of one type of model.

    Attributes:
        model_type: as configs name it.
        status: what became of it.
        told: the reason, or the error.
        error: where it ran, the largest relative error of loss and gradients.
        layout: where it ran, how documents were laid out.
    """

    model_type: str
    status: Status
    told: str = ""
    error: float = 0.0
    layout: str = ""


def model_types() -> list[str]:
    """All types of models of which transformers has a causal language model."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def outcome(model_type: str, pool: Any) -> Outcome:
    """The outcome for one type of model.

    Args:
        model_type: as configs name it.
        pool: of two ranks.
    """
    try:
        config = tiny_config(model_type)
        with torch.device("meta"):
            try:
                model = AutoModelForCausalLM.from_config(config, attn_implementation="distca")
            except KeyError:  # a model that looks its implementation up in a list of its own; users load it otherwise
                model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    except Exception as error:  # whatever a config or a package that is missing raises
        return Outcome(model_type, "not built", _first_line(error))
    try:
        check_loss(model)
        settings = plan_settings(model, CONFIG, ranks=2, device=torch.device("cpu"), dtype=torch.float32)
    except ValueError as error:
        return Outcome(model_type, "refused", str(error))
    steps = pool.run(planned, model_type)
    refusals = {told for told, refused, _ in steps if refused}
    errors = [told for told, _, _ in steps if told]
    if errors and len(refusals) == 1 and all(refused for _, refused, _ in steps):
        return Outcome(model_type, "refused", refusals.pop())
    if errors:
        return Outcome(model_type, "unclear error", " | ".join(errors))
    return _compared(model_type, [step for _, _, step in steps], settings.document_layout)


def planned(model_type: str) -> tuple[str, bool, Any]:
    """On each rank: the error, whether hf_distca raised it before any work, and else its loss and gradients."""
    documents = random_documents(LENGTHS)
    begun = False
    try:
        model = _model(model_type, "distca")
        dispatcher = make_dispatcher(model, CONFIG, torch.device("cpu"))
        begun = True
        plan = plan_micro_batch(LENGTHS, dispatcher.settings)
        assert plan.summary.exchange.bytes_total > 0
        bound = dispatcher.bind(plan)
        batch = cut_rows(plan, dist.get_rank(), documents)
        targets = torch.tensor(sum(max(length - 1, 0) for length in LENGTHS))
        loss = model(**batch, labels=batch["shift_labels"], num_items_in_batch=targets, distca_plan=bound).loss
        loss.backward()
        if not bound.ran.attentions or bound.ran.layers_in_turns < bound.ran.layers or len(plan.nano_batches) != 2:
            return f"ran {bound.ran} with {len(plan.nano_batches)} nano-batches", False, None
        result = loss.item(), _gradients(model), _reference(model_type, documents)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        own = isinstance(error, ValueError) and "/hf_distca/" in last.filename and not begun
        return f"{error}" if own else f"{_first_line(error)} ({last.filename.split('/')[-1]}:{last.lineno})", own, None
    return "", False, result


def _model(model_type: str, implementation: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(model_type), attn_implementation=implementation)


def _reference(model_type: str, documents: Sequence[Tensor]) -> tuple[float, dict[str, Any]]:
    """This rank's share of what one process computes with "eager", document by document."""
    model = _model(model_type, "eager")
    targets = sum(max(len(document) - 1, 0) for document in documents)
    share = documents[dist.get_rank() :: 2]
    own = sum(max(len(document) - 1, 0) for document in share)
    loss, gradients = reference_step(model, share)
    return loss * own / targets, {name: (grad * own / targets).numpy() for name, grad in gradients.items()}


def _gradients(model: PreTrainedModel) -> dict[str, Any]:
    return {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


def _compared(model_type: str, steps: list[Any], layout: str) -> Outcome:
    """Both ranks' losses and gradients together beside those of the reference."""
    got, expected = sum(step[0] for step in steps), sum(step[2][0] for step in steps)
    errors = {"loss": abs(got - expected) / abs(expected)}
    got_grads, expected_grads = _added([step[1] for step in steps]), _added([step[2][1] for step in steps])
    largest = max(grad.abs().max() for grad in expected_grads.values())
    for name in {**got_grads, **expected_grads}:
        zero = torch.zeros(())
        one, other = got_grads.get(name, zero), expected_grads.get(name, zero)
        scale = torch.maximum(other.abs().max(), largest * NEGLIGIBLE)
        errors[name] = ((one - other).abs().max() / scale).item()
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    status: Status = "equal" if errors[worst] < ACCEPTED else "wrong"
    return Outcome(model_type, status, f"{worst}, loss {got:.6f} for {expected:.6f}", errors[worst], layout)


def _added(of_ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    added: dict[str, Tensor] = {}
    for gradients in of_ranks:
        for name, gradient in gradients.items():
            tensor = torch.from_numpy(gradient)
            added[name] = added[name] + tensor if name in added else tensor
    return added


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
