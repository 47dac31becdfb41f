"""Planned steps of tiny hybrids, and what they are compared with."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import peft
import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from hf_distca import DistCAConfig
from hf_distca.models.checkpointing import enable_checkpointing
from hf_distca.plan import SEGMENT, Branches, MicroBatchPlan, NanoBatch
from hf_distca.plan.intervals import table_of
from hf_distca.planner.balance import balance
from hf_distca.planner.build import finished, packed_in_order
from hf_distca.planner.layout import assemble
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings
from hf_distca.trainer.assembly import make_dispatcher
from tests.models_and_batches import (
    planned_step,
    random_documents,
    reference_step,
    relative_error,
    with_planning,
)
from tests.survey.tiny import tiny_config

Ranks = Sequence[Sequence[tuple[int, int, int]]]
"""(document, start, stop) of each segment, in row order, for each rank."""


def cut_plan(
    lengths: Sequence[int],
    nano_batches: Sequence[Ranks],
    settings: PlanSettings,
    branches: Branches | None = None,
) -> MicroBatchPlan:
    """The plan of a micro-batch whose nano-batches lie on the ranks as given; documents are
    numbered over all.
    """
    lengths_array = np.array(lengths, np.int64)
    nanos = []
    for ranks in nano_batches:
        cut = [(*segment, rank) for rank, segments in enumerate(ranks) for segment in segments]
        numbers, starts, stops, holders = np.array(cut).T
        documents, numbers = np.unique(numbers, return_inverse=True)
        segments = table_of(SEGMENT, document=numbers, start=starts, stop=stops, rank=holders)
        layout = assemble(lengths_array[documents], segments, len(ranks))
        if branches is not None:
            parents = branches.parents[documents]
            places = np.where(parents < 0, -1, np.searchsorted(documents, parents))
            layout = replace(layout, branches=Branches(places, branches.starts[documents]))
        nanos.append(
            NanoBatch(
                documents,
                layout,
                {kind: balance(layout, kind, settings) for kind in settings.kinds},
            )
        )
    return finished(nanos, packed_in_order(lengths_array, settings), settings, stages=1)


class Step(NamedTuple):
    """A step of this rank: the loss and gradients of all ranks, and how often mixing modules and
    layers ran.
    """

    loss: float
    grads: dict[str, Tensor]
    ran: tuple[int, int, int] = (0, 0, 0)


def make_model(model_type: str, implementation: str = "distca", *, lora: bool = False) -> Any:
    torch.manual_seed(0)
    config = tiny_config(model_type)
    for name in ("mamba_n_groups", "n_groups"):
        if hasattr(config, name):
            setattr(config, name, 2)
    if hasattr(config, "time_step_limit"):  # steps of time of some rows are beyond either limit
        config.time_step_limit = (0.5, 1.0)
    if (
        model_type == "minimax"
    ):  # a document has several blocks; states of the last layer would not decay
        config.block_size, config.layer_types = 16, config.layer_types[::-1]
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    for name, parameter in model.named_parameters():
        if name.endswith(
            "A_log"
        ):  # a state lasts for a document: else what other ranks add would hardly count
            torch.nn.init.uniform_(parameter, -4.5, -2.5)
    if lora:
        modules = [
            "q_proj",
            "in_proj",
            "in_proj_ba",
        ]  # gates alone, so that values of a first layer need no gradient
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules=modules, init_lora_weights=False)
        )
    return model.train()


def step(
    model_type: str,
    lengths: Sequence[int],
    cut: list[Ranks] | None = None,
    *,
    checkpointing: bool | None = None,
    inner: tuple[str, CheckpointImpl] | None = None,
    lora: bool = False,
    dtype: torch.dtype = torch.float32,
    autocast: bool = False,
    ddp: bool = False,
    hooked: bool = False,
    **options: Any,
) -> Step:
    """A planned step of documents on this rank.

    Args:
        cut: the nano-batches of the plan; None for documents that the planner lays out.
        checkpointing: whether transformers' checkpoints are reentrant; None for none.
        inner: a module that is a checkpoint of its own.
        hooked: with a user's hook inside every layer, which must see all rows.
        options: of DistCAConfig.
    """
    model = make_model(model_type, lora=lora).to(dtype)
    fixed = {"tokens_per_rank": 256, "balance_block_size": 8, "loss_chunk_bytes": 4 * 64 * 20}
    config = DistCAConfig(
        **with_planning({**fixed, "balance_tolerance": 0.01, "ping_pong": True, **options})
    )
    dispatcher = make_dispatcher(model, config, torch.device("cpu"))
    if checkpointing is not None:
        enable_checkpointing(model, {"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    if inner:
        parent, _, child = inner[0].rpartition(".")
        setattr(
            model.get_submodule(parent),
            child,
            checkpoint_wrapper(model.get_submodule(inner[0]), inner[1]),
        )
    if hooked:
        for layer in model.model.layers:
            layer.mlp.register_forward_hook(lambda *_: None)
    settings = dispatcher.settings
    plan = cut_plan(lengths, cut, settings) if cut else plan_micro_batch(lengths, settings)
    bound = dispatcher.bind(plan)
    wrapped = DistributedDataParallel(model) if ddp else model
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, grads = planned_step(wrapped, bound, random_documents(lengths))
    assert len(bound.kept_results) == 0  # recomputations took all that was kept
    return Step(loss, grads, (bound.ran.mixing, bound.ran.layers, bound.ran.layers_in_turns))


def reference(model_type: str, lengths: Sequence[int], lora: bool = False, **rough: Any) -> Step:
    """The step of one process, document by document.

    Args:
        rough: dtype of the weights, or autocast, where the step is one in bfloat16.
    """
    model = make_model(model_type, "eager", lora=lora).to(rough.get("dtype", torch.float32))
    with torch.autocast("cpu", torch.bfloat16, enabled=rough.get("autocast", False)):
        return Step(*reference_step(model, random_documents(lengths)))


def assert_equal(
    got: Step, expected: Step, rough: Step | None = None, within: float = 2e-4
) -> None:
    """A step is the expected one, or as rough as one in bfloat16 is; small gradients are rounding
    errors.
    """
    largest = max(grad.abs().max() for grad in expected.grads.values())
    assert got.grads.keys() == expected.grads.keys()
    if rough:
        assert abs(got.loss - expected.loss) < 2 * abs(rough.loss - expected.loss) + 1e-2
    else:
        assert got.loss == pytest.approx(expected.loss, rel=1e-5)
    for name, grad in expected.grads.items():
        if grad.abs().max() >= (1e-2 if rough else 1e-3) * largest:
            bound = 2 * relative_error(rough.grads[name].float(), grad) + 5e-2 if rough else within
            assert relative_error(got.grads[name].float(), grad) < bound, name
