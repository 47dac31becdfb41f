"""Steps whose checkpoints go to the host are the same to the last bit, whatever checkpoints layers
and however ranks exchange rows.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn.parallel import DistributedDataParallel

from hf_distca import DistCAConfig
from hf_distca.dispatch.host_copies import ActivationOffload, HostMemory
from hf_distca.models.checkpointing import checkpoint_row_bytes, enable_checkpointing
from hf_distca.models.decoder import decoder_layers
from hf_distca.patches.offload import offload_checkpoints
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.trainer.assembly import make_dispatcher
from tests.late_streams import LateStreams
from tests.models_and_batches import (
    CHUNK_BYTES,
    SMALL_HYBRID,
    Step,
    in_stages,
    planned_step,
    random_documents,
    small_model,
    with_lora,
)

pytestmark = pytest.mark.usefixtures("backward_thread")

CPU = torch.device("cpu")
LENGTHS = [120, 7, 90, 33, 64, 1, 48]
LAYERS, MOVED = 5, 3
BLOCK_BYTES = 4096


def by_fsdp(model: Any, how: CheckpointImpl) -> None:
    """Checkpoint decoder layers as accelerate does for FSDP2."""
    layers = decoder_layers(model)
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=partial(checkpoint_wrapper, checkpoint_impl=how),
        check_fn=lambda module: any(module is layer for layer in layers),
    )


def inside_too(model: Any) -> None:
    """Checkpoint decoder layers, and the MLPs in them once more."""
    for layer in decoder_layers(model):
        layer.mlp = checkpoint_wrapper(layer.mlp)
    enable_checkpointing(model, {"use_reentrant": False})


def attention_inside_too(model: Any) -> None:
    """Checkpoint decoder layers, and the attention in them, which is given the plan, once more."""
    for layer in decoder_layers(model):
        layer.self_attn = checkpoint_wrapper(layer.self_attn)
    enable_checkpointing(model, {"use_reentrant": False})


WAYS = {
    "attention inside too": attention_inside_too,
    "inside too": inside_too,
    "transformers": lambda model: enable_checkpointing(model, {"use_reentrant": False}),
    "reentrant": lambda model: enable_checkpointing(model, {"use_reentrant": True}),
    "every second layer": lambda model: enable_checkpointing(model, every_n_layers=2),
    "fsdp": partial(by_fsdp, how=CheckpointImpl.NO_REENTRANT),
    "fsdp reentrant": partial(by_fsdp, how=CheckpointImpl.REENTRANT),
}


@dataclass(frozen=True)
class Case:
    """A planned step."""

    way: str = "transformers"
    ping_pong: bool = True
    model: str = "llama"
    config: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    autocast: bool = False
    ddp: bool = False
    stage_rows: int | None = None
    moved: int = MOVED  # layers whose checkpoints go to the host


LINEAR_AND_FULL = ["linear_attention", "full_attention"]
HYBRID = {**SMALL_HYBRID, "layer_types": [*LINEAR_AND_FULL, *LINEAR_AND_FULL, "linear_attention"]}
CASES = {
    **{way: Case(way, ping_pong=way != "attention inside too") for way in WAYS},
    # Of its three checkpoints the last two stay.
    "every second layer": Case("every second layer", moved=1),
    "no ping-pong": Case(ping_pong=False),
    "stages": Case(stage_rows=20),
    "hybrid": Case(model="qwen3_next", config=HYBRID),
    "LoRA under DDP": Case(lora=True, ddp=True),
    "autocast": Case(autocast=True, ddp=True),
    "LoRA, autocast, stages by FSDP": Case("fsdp", lora=True, autocast=True, stage_rows=20),
}


def step(case: Case, *, moves: bool) -> tuple[Step, dict[str, int], int, int]:
    """A step, bytes that went to host and device, bytes of activation checkpoints that move, and
    chunks that the host memory lacks in the end.
    """
    model: Any = small_model(case.model, num_hidden_layers=LAYERS, **case.config).train()
    if case.lora:
        model = with_lora(model)
    config = DistCAConfig(
        tokens_per_rank=256,
        loss_chunk_bytes=CHUNK_BYTES,
        document_layout="fixed",
        planning={
            "balance_tolerance": 0.01,
            "balance_block_size": 8,
            "ping_pong": case.ping_pong,
        },
    )
    dispatcher = make_dispatcher(model, config, CPU)
    WAYS[case.way](model)
    if case.lora:
        model.enable_input_require_grads()
    streams = LateStreams(BLOCK_BYTES)
    host = HostMemory(2**20, pinned=False, chunk_bytes=256, block_bytes=BLOCK_BYTES)
    if moves:
        dispatcher.offload = ActivationOffload(CPU, case.moved, host, streams)
        offload_checkpoints(model)
    plan = in_stages(plan_micro_batch(LENGTHS, dispatcher.settings), case.stage_rows)
    bound = dispatcher.bind(plan)
    wrapped: nn.Module = DistributedDataParallel(model) if case.ddp else model
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        done = planned_step(wrapped, bound, random_documents(LENGTHS))
    assert (bound.ran.layers_in_turns > 0) is case.ping_pong
    assert len(bound.kept_results) == 0
    kept = bound.rows * checkpoint_row_bytes(
        32,
        dispatcher.settings.kinds,
        hidden_bytes=4,
        value_bytes=2 if case.autocast else 4,
    )
    missing = host.reserved // host.chunk_bytes - len(host._free)
    return done, streams.moved, case.moved * kept, missing


def both_steps(case: Case) -> tuple[Any, Any]:
    return step(case, moves=False), step(case, moves=True)


@pytest.mark.parametrize("name", CASES)
def test_steps_are_the_same_to_the_last_bit(rank_pools, name):
    case = CASES[name]
    for (expected, *_), (got, moved, kept, missing) in rank_pools[2].run(partial(both_steps, case)):
        assert got[0] == expected[0]
        assert got[1].keys() == expected[1].keys()
        for parameter, gradient in expected[1].items():
            assert torch.equal(got[1][parameter], gradient), parameter
        assert moved["host"] == moved["device"]
        if name == "hybrid":  # two of its three layers keep states in place of O
            assert moved["host"] > 3 * kept // 5
        elif name == "fsdp reentrant":  # saves positions too, but moves them once for all layers
            assert kept < moved["host"] < 1.05 * kept
        else:
            assert moved["host"] == kept
        assert missing == 0
