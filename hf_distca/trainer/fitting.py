"""Change a model whose training would not fit into a GPU, before training begins."""

import logging
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_distca.checks.argument_rules import liger_replaces_mlps
from hf_distca.checks.refusal import RefusedError
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.patches.chunked_mlp import chunk_layers
from hf_distca.trainer.memory import (
    CountedMemory,
    checkpointed_layers,
    log_memory,
    warn_of_memory,
)
from hf_distca.trainer.offload import offload_activations, offloaded_bytes
from hf_distca.units import AUTO

logger = logging.getLogger(__name__)

CHUNK_ROWS = 8192
"""Rows of a chunk of an MLP that keep a GPU busy, where `mlp_chunk_rows` is "auto"."""


def fit_into_memory(
    model: PreTrainedModel, args: Any, dispatcher: Dispatcher, *, may_chunk: bool
) -> None:
    """Count the memory of training on a GPU, and change what does not fit.

    Checkpoints go to the host first, which changes no result. MLPs run in chunks only if training
    still does not fit. `dispatcher.run` has what was chosen.

    A collective of the world.
    """

    def counted() -> CountedMemory | None:
        if dispatcher.groups.rank > 0:
            return None
        memory = torch.cuda.get_device_properties(dispatcher.device).total_memory
        return log_memory(model, dispatcher.run, memory)

    run = dispatcher.run
    taken = counted()
    if args.offload_activations == AUTO:
        offload_activations(
            model,
            args,
            dispatcher,
            checkpointed=checkpointed_layers(model, run.checkpointing),
            excess=0 if taken is None else taken.excess,
            # Other strategies cast the weights, and with them the hidden state.
            hidden_bytes=None if run.strategy == "ddp" else run.plans.bytes_per_value,
        )
    offloaded = offloaded_bytes(dispatcher.offload)
    if args.mlp_chunk_rows == AUTO and may_chunk and not liger_replaces_mlps(args):
        excess = 0 if taken is None else taken.excess - offloaded
        if chunk_if_needed(model, dispatcher, excess):
            taken = counted()
    if taken is not None:
        warn_of_memory(taken, offloaded)


def chunk_if_needed(model: PreTrainedModel, dispatcher: Dispatcher, excess: int) -> bool:
    """Compute MLPs in chunks if training does not fit otherwise; return whether they are.

    A collective of the world.

    Args:
        excess: bytes by which training exceeds the device's memory; the largest of all ranks
            counts.
    """
    excess = max(dispatcher.groups.all_gather(excess, in_world=True))
    if excess <= 0 or dispatcher.settings.tokens_per_rank <= CHUNK_ROWS:
        return False
    with suppress(RefusedError):  # no MLP can be divided
        chunk_layers(model, CHUNK_ROWS)
        dispatcher.run = replace(dispatcher.run, mlp_chunk_rows=CHUNK_ROWS)
        if dispatcher.groups.rank == 0:
            logger.warning(
                "training would exceed the GPU's memory by %.1f GB, so MLPs and norms run over "
                "%s rows at a time. Sums of their weights' gradients are rounded once a chunk; "
                "set mlp_chunk_rows=0 to compute all rows at once",
                excess / 1e9,
                CHUNK_ROWS,
            )
        return True
    return False
