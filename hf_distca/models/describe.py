"""The run of a model: its shape and kinds of attention, a document layout and a kernel."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed as dist
from transformers import PreTrainedModel

from hf_distca.checks.model_rules import Models
from hf_distca.config import DistCAConfig
from hf_distca.kernels import AttentionParams, Kernel, Need, choose_kernel, get_kernel
from hf_distca.models.decoder import base_model, decoder_layers
from hf_distca.models.kinds import layers_by_kind
from hf_distca.models.mixing_modules import WHOLE, uncuttable
from hf_distca.models.model_facts import check_model
from hf_distca.models.shape import model_shape
from hf_distca.run import RunSpec
from hf_distca.units import AUTO

logger = logging.getLogger(__name__)


def describe_run(
    model: PreTrainedModel,
    config: DistCAConfig,
    *,
    ranks: int,
    device: torch.device,
    dtype: torch.dtype | None = None,
    ranks_per_node: int | tuple[int, ...] = 1,
    planning: Mapping[str, Any] | None = None,
    **facts: Any,
) -> RunSpec:
    """Describe the training of a model, after checking that the model can be planned.

    With `config.attention_kernel="auto"` the kernel is chosen here, and rank 0 logs the choice.

    Args:
        model: A loaded model of transformers, or PEFT's around one.
        config: Settings for packing and balancing.
        ranks: Number of ranks that train together.
        device: Device of this rank.
        dtype: Dtype of core attention. None takes the model's. Under autocast give autocast's
            dtype.
        ranks_per_node: Number of ranks that share a node, used where `config.ranks_per_node` is
            "auto".
        planning: What the launch asks of plans, as fields of PlanSettings.
        facts: Further facts of the launch, as fields of RunSpec.

    Raises:
        ValueError: The model cannot be planned, has no layers for ping-pong that `config.planning`
            asks for, the kernel does not support its attention, the nodes do not add up to the
            number of ranks, or `config.device_profile` cannot be read.
        ImportError: The package of the kernel is not installed.
    """
    check_model(model, ping_pong=config.planning.ping_pong is True)
    model = base_model(model)
    layout = document_layout(model, config)
    dtype = model.dtype if dtype is None else dtype
    kinds = tuple(layers_by_kind(model))
    softcap = getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    needs: list[Need] = []
    for kind in kinds:
        params = AttentionParams(scale=1.0, window=kind.window, softcap=softcap)
        needs.append(Need(dtype, kind.dim_qk, kind.dim_v, params))
    if config.attention_kernel == AUTO:
        kernel = _chosen_kernel(device, needs)
    else:
        kernel = get_kernel(config.attention_kernel, device, needs)
    of_model: dict[str, Any] = {} if decoder_layers(model) else {"ping_pong": False}
    of_model |= {
        "document_layout": layout,
        "bytes_per_value": dtype.itemsize,
        "row_overhead": kernel.row_overhead,
        "gather_cost": kernel.gather_cost,
        "kernel": kernel.name,
    }
    return RunSpec.of(
        config,
        model_shape(model),
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        planning={**(planning or {}), **of_model},
        **facts,
    )


def _chosen_kernel(device: torch.device, needs: list[Need]) -> Kernel:
    """Return the fastest kernel that can be used, and log the choice."""
    kernel, passed_over = choose_kernel(device, needs)
    if _is_first_process():
        level = logging.WARNING if passed_over else logging.INFO
        reasons = "".join(f"\n- {reason}" for reason in passed_over.values())
        faster = f"; faster here, but not to be had:{reasons}" if reasons else ""
        logger.log(level, "core attention is computed by kernel %r%s", kernel.name, faster)
    return kernel


def _is_first_process() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def document_layout(model: PreTrainedModel, config: DistCAConfig) -> str:
    """Return the document layout for a model.

    It is "whole" if documents of one of the model's modules cannot be cut.
    """
    module = uncuttable(model)
    if module is None:
        return config.document_layout
    module_class = type(module).__name__
    model_class = type(model).__name__
    if config.document_layout not in (AUTO, "whole"):
        raise Models.CUT_MIXING.error(
            layout=config.document_layout, module=module_class, model=model_class
        )
    if config.document_layout == AUTO and _is_first_process():
        logger.info(
            "each document stays whole on one rank (document_layout='whole'), because %s in %s "
            "mixes the rows of a document in a way that cannot be cut: %s",
            module_class,
            model_class,
            WHOLE.get(module_class, "the module is not known"),
        )
    return "whole"
