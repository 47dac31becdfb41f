"""What becomes of equal beginnings of padded sequences, with a tiny causal language model."""

from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from hf_distca import DistCAConfig, pack_padded
from hf_distca.models.decoder import backbone
from hf_distca.planner import prefixes
from hf_distca.refusal import RefusedError
from tests.patches.test_padded import batch_with_prefixes
from tests.survey.outcomes import NEGLIGIBLE
from tests.survey.tiny import tiny_config

Sharing = Literal["shared", "alone", "refused"]


def sharing(model_type: str) -> tuple[Sharing, float]:
    """On each rank: what becomes of equal beginnings, and the largest relative error of the loss
    and of all ranks' gradients beside stock attention.
    """
    try:
        model, stock = (_model(model_type, name) for name in ("distca", "eager"))
        config = DistCAConfig(tokens_per_rank=128, device_profile="cpu", exchange_timeout=20.0)
        dispatcher = pack_padded(model, config, torch.device("cpu"))
    except Exception:  # `test_equal_or_refused` checks the reason
        return "refused", 0.0
    batch = batch_with_prefixes(dist.get_rank())
    try:
        expected, expected_grads = _step(stock, batch)
        with patch.object(prefixes, "BLOCK", 4):
            outputs, found_grads = _step(model, batch)
            plans = [plan.result() for plan in backbone(model).batches._plans.values()]
    except RefusedError:  # a head without its backbone
        return "refused", 0.0
    finally:
        dispatcher.close()
    least = NEGLIGIBLE * max(gradient.abs().max() for gradient in expected_grads.values())
    errors = [abs(outputs - expected) / abs(expected)]
    for name, gradient in expected_grads.items():
        deviation = (found_grads[name] - gradient).abs().max()
        errors.append((deviation / torch.maximum(gradient.abs().max(), least)).item())
    return "shared" if plans[0].shared_rows else "alone", max(errors)


def _model(model_type: str, implementation: str) -> Any:
    torch.manual_seed(0)
    config = tiny_config(model_type)
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


def _step(model: Any, batch: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """This rank's loss, and the sum of all ranks' gradients."""
    loss = model(**batch).loss
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradient = parameter.grad
            gradients[name] = torch.zeros_like(parameter) if gradient is None else gradient
            dist.all_reduce(gradients[name])
    return loss.item(), gradients
