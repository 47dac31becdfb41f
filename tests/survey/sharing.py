"""What becomes of equal prefixes, with a tiny causal language model: of padded sequences, and of
documents with targets.
"""

from typing import Any, Literal

import torch
import torch.distributed as dist

from hf_distca import DistCAConfig, pack_padded
from hf_distca.checks.refusal import RefusedError
from hf_distca.models.decoder import backbone
from hf_distca.models.sharing import why_documents_share_nothing
from hf_distca.patches.targets import repeat_target_rows
from hf_distca.plan import PLAN_KEY
from hf_distca.trainer.assembly import make_dispatcher
from tests.models_and_batches import Step, exchanging, gradients_of, with_planning
from tests.patches.test_padded_models import batch_with_prefixes
from tests.shared_documents import (
    BLOCK,
    in_blocks_of,
    shared_batch,
    step_without_sharing,
    targets_of,
    with_equal_prefixes,
)
from tests.survey.tiny import tiny_model

Sharing = Literal["shared", "unshared", "refused"]
NEGLIGIBLE = 1e-3
"""Gradients of a tensor below this share of the model's largest are compared with that: theirs are
rounding errors."""
LENGTHS = [40, 38, 30, 33, 44, 12, 41, 41, 20, 26, 44, 40]
"""Tokens of documents, which make two trees: one for each nano-batch."""


def sharing_of_sequences(name: str) -> tuple[Sharing, float]:
    """On each rank: what becomes of equal prefixes of a padded batch, and the largest error."""
    model, stock = (_model(name, attention) for attention in ("distca", "eager"))
    config = DistCAConfig(tokens_per_rank=128, device_profile="cpu", exchange_timeout=20.0)
    try:
        dispatcher = pack_padded(model, config, torch.device("cpu"))
    except ValueError:  # a model without a backbone
        return "refused", 0.0
    batch = batch_with_prefixes(dist.get_rank())
    try:
        expected = _summed(stock, stock(**batch).loss)
        with in_blocks_of(BLOCK):
            found = _summed(model, model(**batch).loss)
            plans = [plan.result() for plan in backbone(model).batches._plans.values()]
    except RefusedError:  # a head that passes the backbone by
        return "refused", 0.0
    finally:
        dispatcher.close()
    return "shared" if plans[0].sequences.shared_rows else "unshared", _error(found, expected)


def sharing_of_documents(name: str) -> tuple[Sharing, float]:
    """On each rank: what becomes of equal prefixes of documents, and the largest error."""
    model, stock = (_model(name, attention) for attention in ("distca", "eager"))
    if why_documents_share_nothing(model) is not None:
        return "unshared", 0.0
    config = DistCAConfig(
        tokens_per_rank=128,
        exchange_timeout=20.0,
        loss_chunk_bytes=4 * 64 * 20,
        **with_planning({"balance_block_size": 4, **exchanging(model)}),
    )
    dispatcher = make_dispatcher(model, config, torch.device("cpu"))
    documents = with_equal_prefixes(LENGTHS)
    try:
        repeat_target_rows(model)
        batch = shared_batch(documents, dispatcher)
        targets = torch.tensor(targets_of(documents))
        found = _summed(model, model(**batch, num_items_in_batch=targets).loss)
        ran = batch[PLAN_KEY].ran
        assert ran.selected_targets
        assert ran.layers_in_turns == ran.layers
    finally:
        dispatcher.close()
    return "shared", _error(found, step_without_sharing(stock, documents))


def _model(name: str, implementation: str) -> Any:
    torch.manual_seed(0)
    return tiny_model(name, implementation)


def _summed(model: Any, loss: torch.Tensor) -> Step:
    """Sum over ranks of a loss, and of all gradients."""
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
    return total.item(), gradients_of(model)


def _error(found: Step, expected: Step) -> float:
    """Largest error of the loss, and of a gradient by the largest value of its tensor."""
    loss, gradients = found
    expected_loss, expected_gradients = expected
    least = NEGLIGIBLE * max(gradient.abs().max() for gradient in expected_gradients.values())
    errors = [abs(loss - expected_loss) / abs(expected_loss)]
    for name, gradient in gradients.items():
        of_stock = expected_gradients.get(name, torch.zeros_like(gradient))
        deviation = (gradient - of_stock).abs().max()
        errors.append((deviation / torch.maximum(of_stock.abs().max(), least)).item())
    return max(errors)
