"""Hybrids whose documents are cut, trained as users do on four ranks of two nodes, beside one process with "sdpa"."""

from pathlib import Path
from typing import Any

import accelerate
import pytest

from hf_distca.dispatch.bound import BoundPlan
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.exchange import Exchange
from tests.trainer import train_script
from tests.trainer.launches import (
    FEW,
    FEW_LENGTHS,
    HYBRID,
    LAUNCHED,
    TOKENS_PER_RANK,
    reference_evaluations,
    reference_run,
)

# Without experts, whose weights transformers' trainer does not read from a checkpoint under DDP.
MODEL = {**HYBRID, "mlp_only_layers": [0, 1]}
RUN: dict[str, Any] = {"model": MODEL, "lengths": FEW_LENGTHS, "sets": {"few": 5}, "generates": 3}
STEPS = 4
# As many tokens together as two ranks have in the launches; K and V travel in stages.
ARGUMENTS = {
    **FEW,
    "max_steps": STEPS,
    "tokens_per_rank": TOKENS_PER_RANK // 2,
    "document_layout": "joint",
    "ranks_per_node": 2,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 3,  # in the middle of the second pass
}
RUNS = {
    "whole": {"arguments": ARGUMENTS, "calls": ["train"]},
    "resumed": {"arguments": ARGUMENTS, "calls": ["train"], "resume": "whole/checkpoint-3"},
    "autocast, LoRA": {
        "arguments": {**ARGUMENTS, "bf16": True, "learning_rate": 3e-2},
        "calls": ["train"],
        "lora": ["q_proj", "in_proj_qkvz", "out_proj"],
    },
}


def _train(folder: str) -> tuple[dict[str, dict[str, Any]], dict[str, list[Any]]]:
    """The results of all runs, and of each what its exchanges carry: what, in which dtype; and its bound plans."""
    results, seen = {}, {}
    buffer_of, bind = Exchange.buffer, Dispatcher.bind

    def buffer(found: list[Any], exchange: Exchange, slot: Any, route: Any, like: Any) -> Any:
        found.append((slot[0], str(like[0].dtype)) if isinstance(slot, tuple) else None)
        return buffer_of(exchange, slot, route, like)

    def bound(found: list[Any], dispatcher: Dispatcher, plan: Any) -> BoundPlan:
        found.append(bind(dispatcher, plan))
        return found[-1]

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    for name, run in RUNS.items():
        run = {**RUN, **run, "arguments": {**run["arguments"], "output_dir": f"{folder}/{name}"}}
        exchanged: list[Any] = []
        plans: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            for variable, value in LAUNCHED["ddp"].items():
                patch.setenv(variable, value)
            patch.setattr(Exchange, "buffer", lambda *args, found=exchanged: buffer(found, *args))
            patch.setattr(Dispatcher, "bind", lambda *args, found=plans: bound(found, *args))
            results[name] = train_script.train(train_script.make_model(run), run, Path(folder))
        seen[name] = [
            set(exchanged),
            sum(plan.cuts_documents for plan in plans),
            sum(
                any(routes.forwards for nano in plan.nano_batches for routes in nano.routes.values()) for plan in plans
            ),
            sum(plan.ran.layers_in_turns for plan in plans),
        ]
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return results, seen


@pytest.fixture(scope="module")
def ranks(rank_pools, tmp_path_factory):
    return rank_pools[4].run(_train, str(tmp_path_factory.mktemp("hybrid")))


def reference(name: str) -> dict[str, Any]:
    run = {**RUN, **RUNS[name]}
    return {**run, "arguments": {**run["arguments"], "tokens_per_rank": TOKENS_PER_RANK}}


def test_losses_evaluations_and_generated_tokens_are_those_of_one_process(ranks):
    run = reference("whole")
    expected, evaluations = reference_run(run)["losses"], reference_evaluations(run, STEPS)
    for results, seen in ranks:
        found = results["whole"]
        assert found["losses"] == pytest.approx(expected, rel=1e-4)
        losses = [entry["eval_few_loss"] for entry in found["history"] if "eval_few_loss" in entry]
        assert losses == pytest.approx([few for (few,), _ in evaluations], rel=1e-4)
        assert found["generated"] == [tokens for _, tokens in evaluations]
        exchanged, cut, forwarded, in_turns = seen["whole"]
        assert {("halos", "torch.float32"), ("states", "torch.float32")} <= exchanged
        assert min(cut, forwarded, in_turns) > 0


def test_a_resumed_training_goes_on_as_the_first_one_did(ranks):
    for results, _ in ranks:  # but for the order in which DDP adds up the gradients of four ranks
        assert results["resumed"]["losses"] == pytest.approx(results["whole"]["losses"], rel=1e-6)


def test_autocast_keeps_states_in_float32(ranks):
    expected = reference_run(reference("autocast, LoRA"))["losses"]
    for results, seen in ranks:
        assert results["autocast, LoRA"]["losses"] == pytest.approx(expected, rel=8e-3)
        exchanged, cut, *_ = seen["autocast, LoRA"]
        assert {("halos", "torch.bfloat16"), ("states", "torch.float32")} <= exchanged
        assert cut > 0
