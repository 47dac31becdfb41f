"""Trainers with padded batches beside the same trainers without hf_distca, on the same ranks, data
and rollouts.
"""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import DataCollatorForSeq2Seq, EvalPrediction, Trainer, TrainingArguments

import hf_distca
from hf_distca.checks.argument_rules import ARGUMENTS
from hf_distca.dispatch import padded_rows
from hf_distca.dispatch.process_groups import Groups
from hf_distca.patches.padded_models import PackedBackbone
from hf_distca.trainer.trl import preference
from tests.models_and_batches import exchanging, small_model, with_planning
from tests.ranks import RankPool
from tests.refused import refused
from tests.trainer.chats import tokenizer
from tests.trainer.comparison import HYBRID, dataset_of, launched, whole
from tests.trainer.preferences import (
    COMMON,
    KINDS,
    PLANNED,
    Case,
    compare,
    compare_with_stock,
    few_words,
    train,
)

WITHIN = 1e-4
"""Largest relative difference of a logged figure or of what a weight has learned, in float32."""
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
REENTRANT = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}


def lora() -> dict[str, Any]:
    """LoRA whose B is not 0 at first, so that the model with the adapter off is another one."""
    targets = ["q_proj", "v_proj", "gate_proj"]
    return {
        "peft_config": peft.LoraConfig(
            r=4,
            init_lora_weights=False,
            task_type="CAUSAL_LM",
            target_modules=targets,
            lora_alpha=8,
        )
    }


ONE_LAUNCH: dict[str, list[Case]] = {
    "two ranks": [
        *(Case(kind) for kind in KINDS),
        Case("dpo", arguments={"gradient_accumulation_steps": 2}, evaluates=True),
        Case("grpo", arguments={"max_steps": 1}, evaluates=True),
        Case("dpo", given=lora),
        Case("grpo", given=lora),
        Case(
            "grpo",
            arguments={
                "num_iterations": 2,
                "steps_per_generation": 2,
                "beta": 0.0,
                "max_steps": 4,
            },
        ),
        Case("dpo", arguments={"precompute_ref_log_probs": True, "loss_type": ["sigmoid", "sft"]}),
        Case("dpo", model=HYBRID),
        Case("grpo", model={**EXPERTS, "output_router_logits": True}),
        Case("dpo", planned={"tokens_per_rank": 40}),
        Case(
            "dpo",
            arguments={"save_strategy": "steps", "save_steps": 2, "max_steps": 4},
            given=lora,
            resumes=True,
        ),
    ],
    "three ranks": [
        Case("dpo", given=lora),
        Case("grpo"),
        Case("dpo", arguments={"max_length": 12}),
    ],
    "fsdp2": [
        *(Case(kind, "fsdp2") for kind in KINDS),
        Case("kto", "fsdp2", given=lora),
    ],
    "zero3": [
        *(Case(kind, "zero3") for kind in KINDS),
        Case("dpo", "zero3", given=lora, planned={"tokens_per_rank": 300}),
    ],
}
"""Trainings by launch, one after another in the same processes."""


@pytest.mark.parametrize("launch", ONE_LAUNCH)
@pytest.mark.launches
def test_trainings_are_those_of_trl(launch, tmp_path, subtests):
    # Ranks of their own: trainers leave their state in a process.
    pool = RankPool(3 if launch == "three ranks" else 2)
    exchange_bytes, shared_rows = [], []
    try:
        for number, case in enumerate(ONE_LAUNCH[launch]):
            with subtests.test(str(case)):
                # DeepSpeed's groups are those of its first training.
                by_rank = pool.run(
                    compare_with_stock,
                    str(tmp_path / str(number)),
                    case,
                    WITHIN,
                    keeps_groups=case.strategy == "zero3",
                )
                first_step = by_rank[0][0]
                exchange_bytes.append(first_step["distca/exchange_bytes"])
                assert 0 < first_step["distca/padding_share"] < 1
                assert first_step["distca/computed_rows"] > 0
                shared_rows.append(first_step["distca/shared_rows"])
        assert max(exchange_bytes) > 0
        assert max(shared_rows) > 0
    finally:
        pool.close()


def plans_of_rollouts(folder: str, kind: str) -> tuple[list[str], int]:
    """What a training did before its models ran, in this order, and the number of its plans."""
    events: list[str] = []
    made = []
    exchange, prepared = Groups.all_gather_in_pod, padded_rows.plan_padded

    def exchanged(self: Groups, *args: Any, contents: str) -> Any:
        if contents.startswith("lengths of sequences"):
            events.append("ahead" if contents.endswith("later batches") else "packed")
        return exchange(self, *args, contents=contents)

    def planned(*args: Any) -> Any:
        made.append(args)
        return prepared(*args)

    arguments = {"num_iterations": 2, "steps_per_generation": 2, "max_steps": 4}
    with (
        patch.object(Groups, "all_gather_in_pod", exchanged),
        patch.object(padded_rows, "plan_padded", planned),
    ):
        train(folder, Case(kind, arguments=arguments), planned=True)
    return events, len(made)


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_rollouts_are_planned_as_soon_as_they_are_known(rank_pools, tmp_path, kind):
    """Two chunks of rollouts, which the model and the reference see; then two micro-batches, which
    the model sees twice.
    """
    chunks = ["ahead", "packed", "packed"]
    events = [*chunks, *chunks, "ahead", *["packed"] * 4]
    assert rank_pools[2].run(plans_of_rollouts, str(tmp_path), kind) == [(events, 6)] * 2


# Completions of a prompt in one micro-batch

DIVIDED = {"per_device_train_batch_size": 2, "num_generations": 4, "max_steps": 1}
"""Each rank has two prompts with four completions each, and two at a time."""
MEANS = "kl|entropy|clip_ratio/.*"
"""Figures that TRL computes of each micro-batch, and then takes the mean."""
TOGETHER = {
    "dapo": Case("grpo", arguments={**DIVIDED, "gradient_accumulation_steps": 4}),
    "grpo, several steps": Case(
        "grpo",
        arguments={
            **DIVIDED,
            "loss_type": "grpo",
            "gradient_accumulation_steps": 2,
            "steps_per_generation": 4,
            "num_iterations": 2,
            "max_steps": 3,
        },
    ),
    "dr_grpo, several generations": Case(
        "grpo",
        arguments={
            **DIVIDED,
            "loss_type": "dr_grpo",
            "gradient_accumulation_steps": 8,
            "steps_per_generation": 4,
        },
    ),
    "rloo": Case("rloo", arguments={**DIVIDED, "gradient_accumulation_steps": 4}),
}


def compare_kept_together(folder: str, case: Case) -> float:
    """Compare with TRL's own order; return the shared rows of all steps."""
    expected = train(f"{folder}/stock", case, planned=False)
    trained = train(f"{folder}/together", case, planned=True)
    compare(trained, expected, WITHIN, besides=MEANS)
    return shared_rows(trained)


def shared_rows(trained: dict[str, Any]) -> float:
    return float(sum(step.get("distca/shared_rows", 0) for step in trained["figures"]))


def shared_in_order_of_trl(folder: str, case: Case) -> float:
    """Return the shared rows of a training whose rollouts stay where TRL shuffles them."""
    with patch.object(preference, "why_shuffled", lambda _: "a test"):
        return shared_rows(train(folder, case, planned=True))


@pytest.mark.parametrize("name", TOGETHER)
def test_completions_of_a_prompt_share_a_micro_batch(rank_pools, tmp_path, name):
    case = TOGETHER[name]
    (shared, _) = rank_pools[2].run(compare_kept_together, str(tmp_path), case)
    assert shared > 0
    if name == "dapo":
        (apart, _) = rank_pools[2].run(shared_in_order_of_trl, str(tmp_path / "apart"), case)
        assert shared > 1.2 * apart > 0


def train_in_bf16(folder: str) -> tuple[float, float]:
    """How far weights are from those of float32 after a training in bfloat16: with hf_distca, and
    of TRL's trainer.
    """
    case = Case("dpo", arguments={"bf16": True, "max_steps": 4})
    exact = train(folder, case, planned=False, exact=True)["learned"]
    planned, stock = (
        distance(train(folder, case, planned=planned)["learned"], exact)
        for planned in (True, False)
    )
    return planned, stock


def test_bfloat16_is_at_most_twice_as_far_from_float32_as_without_hf_distca(rank_pools, tmp_path):
    for planned_errors, stock_errors in rank_pools[2].run(train_in_bf16, str(tmp_path)):
        assert 0 < planned_errors < 2 * stock_errors


# Prefix sharing in two nano-batches

IN_TURNS: dict[str, Case] = {
    "checkpoints on the host, accumulated": Case(
        "dpo",
        arguments={"gradient_checkpointing": True, "gradient_accumulation_steps": 2},
        planned={"offload_activations": True},
    ),
    "LoRA, checkpoints on the host, fsdp2": Case(
        "dpo",
        "fsdp2",
        {"gradient_checkpointing": True},
        lora,
        planned={"offload_activations": True},
    ),
    "bf16, accumulated, fsdp2": Case(
        "dpo", "fsdp2", {"bf16": True, "gradient_accumulation_steps": 2}
    ),
}
"""Trainings whose micro-batches have two nano-batches."""


def train_shared_and_unshared(folder: str, case: Case) -> dict[str, dict[str, Any]]:
    """Train a model of three layers with prefix sharing, without, and without in float32."""
    of_case = replace(case, model={"num_hidden_layers": 3})
    unshared = replace(of_case, planned={**of_case.planned, "share_prefixes": False})
    return {
        "shared": train(f"{folder}/shared", of_case, planned=True),
        "unshared": train(f"{folder}/unshared", unshared, planned=True),
        "exact": train(f"{folder}/exact", unshared, planned=True, exact=True),
    }


@pytest.mark.parametrize("name", IN_TURNS)
def test_prefixes_are_shared_in_two_nano_batches(rank_pools, tmp_path, name):
    case = IN_TURNS[name]
    for trained in rank_pools[2].run(train_shared_and_unshared, str(tmp_path), case):
        steps = [step for step in trained["shared"]["figures"] if "distca/shared_rows" in step]
        assert len(steps) == 2
        assert all(step["distca/shared_rows"] > 0 for step in steps)
        assert all(step["distca/ping_pong_share"] == 1 for step in steps)
        assert shared_rows(trained["unshared"]) == 0
        if not case.arguments.get("bf16"):
            compare(trained["shared"], trained["unshared"], WITHIN)
            continue
        learned = trained["exact"]["learned"]
        assert distance(trained["shared"]["learned"], learned) < 2 * distance(
            trained["unshared"]["learned"], learned
        )


def distance(learned: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Norm of the difference of all weights."""
    assert learned.keys() == expected.keys()
    return float(
        np.sqrt(sum(float((learned[name] - expected[name]).square().sum()) for name in expected))
    )


# Stock Trainer: its own collator, loss and metrics


class LastNorm(nn.Module):
    """A loss of a user's own: the mean square of the hidden state and of the logits of the last
    token.
    """

    def forward(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        is_target_BL = labels != -100
        outputs_BLX = torch.cat([outputs["hidden_states"][-1], outputs["logits"]], -1)
        lasts_B = labels.shape[1] - 1 - is_target_BL.flip(1).byte().argmax(1)
        last_BX = outputs_BLX[torch.arange(len(labels)), lasts_B]
        loss: Tensor = last_BX.square().sum() / (
            len(labels) if num_items_in_batch is None else num_items_in_batch
        )
        return loss


def norms(evaluated: EvalPrediction) -> dict[str, float]:
    logits, hidden = evaluated.predictions
    targets = evaluated.label_ids != -100
    return {
        "logits": float(np.abs(logits[targets]).mean()),
        "hidden": float(np.abs(hidden[targets]).mean()),
    }


def kept(outputs: Any, labels: Tensor) -> Any:
    """Of what a model returns: logits, and hidden states after the last layer."""
    return outputs[0], outputs[1][-1]


class PaddedTrainer(hf_distca.DistCAPaddedMixin, Trainer):
    pass


@dataclass
class PaddedArguments(hf_distca.DistCAPaddedArguments, TrainingArguments):
    pass


def train_with_own_loss(folder: str, way: str) -> dict[str, Any]:
    """A training and an evaluation by transformers' Trainer: alone, with the mixin, or with
    `pack_padded`.
    """
    with launched("ddp", {}):
        torch.manual_seed(1)
        model = small_model(
            implementation="sdpa" if way == "stock" else "distca", output_hidden_states=True
        )
        arguments = {**COMMON, "output_dir": folder, "use_cpu": True}
        settings: dict[str, Any] = with_planning({**PLANNED, **exchanging(model)})
        if way == "mixin":
            args: Any = PaddedArguments(**arguments, **settings)
        else:
            args = TrainingArguments(**arguments)
        dispatcher = None
        if way == "pack_padded":
            dispatcher = hf_distca.pack_padded(
                model, hf_distca.DistCAConfig(**settings), args.device
            )
        data = dataset_of([30, 4, 19, 7, 3, 25, 11, 2])
        data = data.add_column("labels", data["input_ids"])
        trainer = (PaddedTrainer if way == "mixin" else Trainer)(
            model,
            args,
            train_dataset=data,
            eval_dataset=data,
            data_collator=DataCollatorForSeq2Seq(tokenizer()),
            compute_loss_func=LastNorm(),
            compute_metrics=norms,
            preprocess_logits_for_metrics=kept,
        )
        before = {name: whole(weight) for name, weight in model.named_parameters()}
        trainer.train()
        predicted = trainer.predict(data)
        result = {
            "history": [{"loss": trainer.state.log_history[0]["loss"]}, trainer.evaluate()],
            "learned": {
                name: whole(weight) - before[name] for name, weight in model.named_parameters()
            },
            "rounding": {name: float(2.0**-24 * weight.norm()) for name, weight in before.items()},
            "predicted": [
                np.where(predicted.label_ids[..., None] != -100, values, 0)
                for values in predicted.predictions
            ],
        }
        for times in ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second"):
            result["history"][1].pop(times)
        if way == "mixin":
            trainer.close()
        elif dispatcher is not None:
            dispatcher.close()
    return result


def compare_own_loss(folder: str) -> None:
    expected = train_with_own_loss(folder, "stock")
    for way in ("mixin", "pack_padded"):
        trained = train_with_own_loss(folder, way)
        compare(trained, expected, WITHIN)
        for values, expected_values in zip(
            trained["predicted"], expected["predicted"], strict=True
        ):
            np.testing.assert_allclose(values, expected_values, rtol=1e-3, atol=1e-5)


def test_own_losses_metrics_and_predictions_of_transformers_trainer(rank_pools, tmp_path):
    rank_pools[2].run(compare_own_loss, str(tmp_path))


# Figures over padding

OVER_PADDING = {
    "ORPOTrainer": ("orpo/orpo_trainer.py", "logits/chosen", "logits/rejected"),
    "CPOTrainer": ("cpo/cpo_trainer.py", "logits/chosen", "logits/rejected"),
    "OnlineDPOTrainer": (
        "online_dpo/online_dpo_trainer.py",
        *("objective/kl", "objective/entropy"),
        *("objective/non_score_reward", "objective/rlhf_reward"),
    ),
}
"""Figures of TRL's experimental trainers that count padding, with the file of the trainer."""


def test_figures_over_padding_are_on_the_page():
    (trl_folder,) = find_spec("trl").submodule_search_locations
    page = (Path(__file__).parents[2] / "docs/guides/preferences.md").read_text()
    for trainer, (file, *figures) in OVER_PADDING.items():
        code = (Path(trl_folder) / "experimental" / file).read_text()
        assert f"class {trainer}" in code
        for figure in figures:
            assert f'{figure}"' in code
            assert f"`{figure}`" in page


# What is refused, and what is left as it was


def refused_trainings(folder: str) -> None:
    """Several micro-batches where a weight would get several gradients; on all ranks."""
    with pytest.raises(ValueError, match="checkpoints are reentrant"):
        train(
            folder, Case("dpo", arguments=REENTRANT, planned={"tokens_per_rank": 40}), planned=True
        )


def refused_under_zero3(folder: str) -> None:
    with pytest.raises(ValueError, match="ZeRO-3 gathers whole layers"):
        train(
            folder,
            Case("dpo", "zero3", planned={"ping_pong": True, "tokens_per_rank": 40}),
            planned=True,
        )


@pytest.mark.launches
def test_several_gradients_of_a_weight_are_refused(tmp_path):
    for function in (refused_trainings, refused_under_zero3):
        pool = RankPool(2)
        try:
            pool.run(function, str(tmp_path))
        finally:
            pool.close()


def test_arguments_and_models_by_name(tmp_path):
    small_model().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    options = {"use_cpu": True, "bf16": False, "report_to": [], **KINDS["grpo"].arguments}
    given = {
        "reward_funcs": few_words,
        "train_dataset": KINDS["grpo"].data(),
        "processing_class": tokenizer(),
    }
    args = hf_distca.DistCAGRPOConfig(str(tmp_path), **options)
    trainer = hf_distca.DistCAGRPOTrainer(str(tmp_path), args=args, **given)
    models: Any = (trainer.model, trainer.ref_model)
    assert [model.config._attn_implementation for model in models] == ["distca"] * 2
    assert all(isinstance(model.base_model, PackedBackbone) for model in models)
    with refused(ARGUMENTS[4]):
        args = hf_distca.DistCAGRPOConfig(
            str(tmp_path), **options, use_transformers_continuous_batching=True
        )
        hf_distca.DistCAGRPOTrainer(str(tmp_path), args=args, **given)


def drawn_numbers(folder: str) -> None:
    """Making a dispatcher, which measures the device, draws nothing from torch's generator."""
    config = hf_distca.DistCAConfig(tokens_per_rank=64)
    model = small_model()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    dispatcher = hf_distca.pack_padded(model, config, torch.device("cpu"), folder=Path(folder))
    assert (Path(folder) / "device_profile.json").exists() or dist.get_rank() > 0
    assert torch.equal(torch.rand(3), expected)
    dispatcher.close()


def test_a_dispatcher_draws_no_random_numbers(rank_pools, tmp_path):
    rank_pools[2].run(drawn_numbers, str(tmp_path))
