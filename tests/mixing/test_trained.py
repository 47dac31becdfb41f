"""Hybrids whose documents are cut, trained as users do on four ranks of two nodes, beside one process with "sdpa"."""

from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import hf_distca
from hf_distca.dispatch.bound import BoundPlan
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.exchange import Exchange
from tests.models_and_batches import SMALL_HYBRID, exchanging, small_model
from tests.trainer.comparison import (
    ALONE,
    COMMON,
    LENGTHS,
    PLANNED,
    ROUNDING,
    TOKENS_PER_RANK,
    dataset_of,
    launched,
    pad,
)

EVALUATED = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1}
ON_NODES = {
    "tokens_per_rank": TOKENS_PER_RANK // 2,  # as many tokens together as two ranks have
    "exchange_buffer_bytes": 1024,  # K and V travel in stages
    "document_layout": "joint",
    "ranks_per_node": 2,
    "dataloader_num_workers": 0,
    "save_strategy": "steps",
    "save_steps": 2,
}
RUNS: dict[str, dict[str, Any]] = {"whole": {}, "resumed": {}, "autocast, LoRA": {"bf16": True}}


def _model(name: str, implementation: str) -> nn.Module:
    # Without experts, whose weights transformers' trainer does not read from a checkpoint under DDP.
    model = small_model("qwen3_next", implementation, **SMALL_HYBRID, mlp_only_layers=[0, 1])
    if "LoRA" not in name:
        return model
    torch.manual_seed(0)
    modules = ["q_proj", "in_proj_qkvz", "out_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=modules, init_lora_weights=False))


class Generates(TrainerCallback):
    """Generates from the model as it is after each step."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []

    def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
        """Generate."""
        prompt = torch.tensor([[5, 9, 17, 33]])
        given = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0}
        self.tokens.append(model.generate(prompt, min_new_tokens=3, max_new_tokens=3, **given)[0].tolist())


def _log(trainer: Any, resume: str | None = None) -> dict[str, Any]:
    """Losses, evaluations and generated tokens of a training."""
    generates = Generates()
    trainer.add_callback(generates)
    trainer.train(resume_from_checkpoint=resume)
    history = trainer.state.log_history
    found = {key: [entry[key] for entry in history if key in entry] for key in ("loss", "eval_loss")}
    return {**found, "generated": generates.tokens}


def _train(folder: str) -> dict[str, tuple[dict[str, Any], set[Any], list[int]]]:
    """Of each run its log; what its exchanges carry, in which dtype; how many plans cut documents, and so on."""
    results = {}
    buffer_of, bind = Exchange.buffer, Dispatcher.bind
    for name, changed in RUNS.items():
        exchanged: set[Any] = set()
        plans: list[BoundPlan] = []

        def buffer(exchange: Exchange, slot: Any, route: Any, like: Any, exchanged=exchanged) -> Any:
            exchanged.add((slot[0], str(like[0].dtype)) if isinstance(slot, tuple) else slot)
            return buffer_of(exchange, slot, route, like)

        def bound(dispatcher: Dispatcher, plan: Any, plans=plans) -> BoundPlan:
            plans.append(bind(dispatcher, plan))
            return plans[-1]

        with launched("ddp", {}) as patch:
            patch.setattr(Exchange, "buffer", buffer)
            patch.setattr(Dispatcher, "bind", bound)
            model = _model(name, "distca")
            arguments = {**COMMON, **EVALUATED, **PLANNED, **exchanging(model), **ON_NODES, **changed}
            args = hf_distca.DistCATrainingArguments(f"{folder}/{name}", **arguments)
            documents = dataset_of(LENGTHS)
            trainer = hf_distca.DistCATrainer(model=model, args=args, train_dataset=documents, eval_dataset=documents)
            log = _log(trainer, f"{folder}/whole/checkpoint-2" if name == "resumed" else None)
            trainer.close()
        forwards = [any(r.forwards for nano in plan.nano_batches for r in nano.routes.values()) for plan in plans]
        cut, in_turns = ([plan.cuts_documents for plan in plans], [plan.ran.layers_in_turns for plan in plans])
        results[name] = log, exchanged, [sum(each) for each in (cut, forwards, in_turns)]
    return results


@pytest.fixture(scope="module")
def ranks(rank_pools, tmp_path_factory):
    return rank_pools[4].run(_train, str(tmp_path_factory.mktemp("hybrid")))


def alone(name: str, folder: Any) -> dict[str, Any]:
    with launched("ddp", {}):
        args = TrainingArguments(str(folder), **{**COMMON, **EVALUATED, **ALONE, **RUNS[name]})
        documents = dataset_of(LENGTHS)
        given = {"data_collator": pad, "train_dataset": documents, "eval_dataset": documents}
        return _log(Trainer(_model(name, "sdpa"), args, **given))


def test_losses_evaluations_and_generated_tokens_are_those_of_one_process(ranks, tmp_path):
    expected = alone("whole", tmp_path)
    for results in ranks:
        found, exchanged, counts = results["whole"]
        for key in ("loss", "eval_loss"):
            assert found[key] == pytest.approx(expected[key], rel=1e-5)
        assert found["generated"] == expected["generated"]
        assert {("halos", "torch.float32"), ("states", "torch.float32")} <= exchanged
        assert min(counts) > 0


def test_a_resumed_training_goes_on_as_the_first_one_did(ranks):
    for results in ranks:  # but for the order in which DDP adds up the gradients of four ranks
        (whole, *_), (resumed, *_) = results["whole"], results["resumed"]
        assert resumed["loss"] == pytest.approx(whole["loss"], rel=1e-6)
        assert resumed["generated"] == whole["generated"][2:]


def test_autocast_keeps_states_in_float32(ranks, tmp_path):
    expected = alone("autocast, LoRA", tmp_path)
    for results in ranks:
        found, exchanged, counts = results["autocast, LoRA"]
        assert found["loss"] == pytest.approx(expected["loss"], rel=2 * ROUNDING)
        assert {("halos", "torch.bfloat16"), ("states", "torch.float32")} <= exchanged
        assert min(counts) > 0
