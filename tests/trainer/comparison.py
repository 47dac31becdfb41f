"""Trainings with planned attention beside transformers' or TRL's trainer with "sdpa" in one
process.

Both get the same documents. What is computed in float32 may differ by roundings of float32. What is
computed in bfloat16 is held against one process in float32 as well: norms and weights may be at
most twice as far from that process as those of one process in bfloat16 are.
"""

import copy
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import accelerate
import datasets
import numpy as np
import peft
import pytest
import torch
import torch.distributed as dist
import trl
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    EvalPrediction,
    Trainer,
    TrainingArguments,
    training_args,
)
from transformers.distributed import DistributedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import hf_distca
from hf_distca.checks.setting_names import CHECKPOINTING
from tests.models_and_batches import (
    SMALL_HYBRID,
    exchanging,
    random_documents,
    small_model,
    with_planning,
)
from tests.whole_logits import WholeLogits

IGNORED = -100
LENGTHS = [90, 50, 33, 19, 120, 40, 31, 1, 64, 64, 37, 27]
PER_MICRO_BATCH, TOKENS_PER_RANK = 4, 96
"""Each four documents fill two ranks, so that micro-batches are the same for anybody who takes them
in order."""
VOCABULARY = 67
"""A size that nothing else has: where a model has it, tensors of tokens × vocabulary are looked
for."""
QUIET: dict[str, Any] = {
    "report_to": [],
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "lr_scheduler_type": "constant",
}
"""Arguments of trainings of a few steps: each step is logged, and nothing else is written."""
COMMON: dict[str, Any] = {
    **QUIET,
    "logging_nan_inf_filter": False,
    "train_sampling_strategy": "sequential",
    "max_steps": 2,
    "bf16": False,
    CHECKPOINTING: True,
    "optim": "sgd",
    "learning_rate": 0.3,
}
ALONE = {
    "use_cpu": True,
    "per_device_train_batch_size": PER_MICRO_BATCH,
    "per_device_eval_batch_size": 100,
}
PLANNED = {"tokens_per_rank": TOKENS_PER_RANK, "balance_block_size": 8, "loss_chunk_bytes": 4096}
EXACT_LOSS, EXACT = 1e-6, 4e-5
"""Relative errors in float32: a few roundings of 2^-24 of a loss, and of gradients, whose summands
have both signs."""
ROUNDING = 2.0**-8
"""Relative error of rounding to bfloat16: of the losses of single targets. Roundings are
independent of one another, so that the mean loss is off by the root of the number of targets
less."""
TARGETS = sum(LENGTHS[:PER_MICRO_BATCH]) - PER_MICRO_BATCH
FOLLOWED = re.compile(
    r"(eval_(\w+_)?)?(loss|grad_norm|entropy|mean_token_accuracy|by_document|num_tokens)"
    r"|num_input_tokens_seen"
)
"""What is compared of a log."""
ACCURACY = re.compile("mean_token_accuracy|by_document")
HYBRID: dict[str, Any] = {"model_type": "qwen3_next", **SMALL_HYBRID}
Example = dict[str, Any]
Result = dict[str, Any]


@dataclass(frozen=True)
class Strategy:
    """How ranks share a training."""

    environment: Mapping[str, str]  # variables that `accelerate launch` sets
    type: str  # part of accelerate's name of the strategy
    ranks: int = 2
    shares: int = 2  # number of ranks with rows of their own
    divided: Mapping[str, int] = field(
        default_factory=dict
    )  # mesh over which transformers divides the model


AS_GPUS = {"ACCELERATE_TORCH_DEVICE": "cpu"}
"""With these accelerate takes processes for GPUs, so that a model may be divided; see `launched`.
"""
STRATEGIES = {
    "ddp": Strategy({"ACCELERATE_USE_CPU": "true"}, "MULTI_CPU"),
    "fsdp2": Strategy(
        {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
            "FSDP_RESHARD_AFTER_FORWARD": "true",
        },
        "FSDP",
    ),
    "zero2": Strategy(
        {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}, "DEEPSPEED"
    ),
    "zero3": Strategy(
        {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, "DEEPSPEED"
    ),
    "tp and fsdp": Strategy(AS_GPUS, "", 4, 2, {"tp_size": 2, "fsdp_size": 2}),
    "tp, fsdp and ep": Strategy(AS_GPUS, "", 4, 2, {"tp_size": 2, "fsdp_size": 2, "ep_size": 2}),
    "tp and replicas": Strategy(AS_GPUS, "", 4, 2, {"tp_size": 2, "dp_replicate_size": 2}),
    "tp": Strategy(AS_GPUS, "", 4, 1, {"tp_size": 4}),
    "fsdp by transformers": Strategy(AS_GPUS, "", 4, 4, {"fsdp_size": 4}),
    "replicated shards": Strategy(AS_GPUS, "FSDP", 4, 4),
}
STRATEGIES["fsdp2 on four ranks"] = replace(STRATEGIES["fsdp2"], ranks=4, shares=4)


def model_of(**config: Any) -> Callable[[str], nn.Module]:
    """Make a model of this configuration with an implementation of attention."""
    return lambda implementation: small_model(implementation=implementation, **config)


plain = model_of()


@dataclass(frozen=True)
class Run:
    """What is set in a training."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    model: Callable[[str], nn.Module] = plain
    adapter: peft.PeftConfig | None = None
    example: Callable[[int, Example], Example] = lambda index, example: (
        example
    )  # changes an example
    given: Callable[[nn.Module], dict[str, Any]] = (
        lambda model: {}
    )  # other arguments of both trainers
    environment: Mapping[str, str] = field(default_factory=dict)
    patched: Callable[[pytest.MonkeyPatch], None] = lambda patch: (
        None
    )  # stands something in for the training
    refused: Mapping[str, str] = field(
        default_factory=dict
    )  # strategies that refuse it, with a part of the error
    only: Collection[str] = ("ddp", "fsdp2", "zero2", "zero3")
    needs: str = "torch"  # package without which it is not tried
    steps_without_targets: int = (
        0  # number of first steps at which one process would divide by zero
    )
    rounds: bool = False  # whether it computes in bfloat16
    within: tuple[float, float] = (
        EXACT_LOSS,
        EXACT,
    )  # errors that are allowed in float32: of losses, of all else
    planned: Mapping[str, Any] = field(
        default_factory=dict
    )  # what hf_distca's trainer gets besides `arguments`
    given_planned: Callable[[], dict[str, Any]] = lambda: {}  # what it gets besides `given`
    alone: Mapping[str, Any] = field(
        default_factory=dict
    )  # what the trainer in one process gets besides `arguments`
    sft: bool = False
    calls: Sequence[str] = (
        "train",
    )  # of "train", "evaluate", and "new trainer", which goes on with the model
    resumes: str | None = (
        None  # checkpoint that hf_distca's trainer resumes from, in the folder of the strategy
    )
    after: Callable[[Any], Any] = lambda trainer: (
        None
    )  # gives a further result of hf_distca's trainer in the end

    def documents(self, without: int = 0) -> datasets.Dataset:
        """Documents as the run changes them, but for the first ones."""
        examples = [
            self.example(index, example) for index, example in enumerate(dataset_of(LENGTHS))
        ]
        return datasets.Dataset.from_list(examples[without:])

    def make_model(self, implementation: str, divided: Mapping[str, int], folder: str) -> Any:
        """The model with its adapter, of which this rank has its part of a mesh."""
        model: Any = self.model(implementation)
        if divided:
            if dist.get_rank() == 0:
                model.save_pretrained(folder)
            dist.barrier()
            mesh = DistributedConfig(**divided)
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                attn_implementation="distca",
                distributed_config=mesh,
                use_cache=False,
                dtype=torch.float32,
            )
        if self.adapter is None:
            return model
        torch.manual_seed(0)
        return peft.get_peft_model(model, copy.deepcopy(self.adapter))


def pad(examples: list[Example]) -> dict[str, torch.Tensor]:
    """Pad a batch of documents, as collators do for models that compute one row for each."""
    ids = [torch.tensor(example["input_ids"]) for example in examples]
    labels = [torch.tensor(example.get("labels", example["input_ids"])) for example in examples]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
    }


def dataset_of(lengths: Sequence[int]) -> datasets.Dataset:
    """Documents of these lengths."""
    return datasets.Dataset.from_list(
        [{"input_ids": document.tolist()} for document in random_documents(lengths)]
    )


@contextmanager
def launched(strategy: str, environment: Mapping[str, str]) -> Iterator[pytest.MonkeyPatch]:
    """While inside, this process has been launched for a strategy, on a device with bfloat16."""
    with pytest.MonkeyPatch.context() as patch:
        for left_behind in ("ACCELERATE_USE_CPU", "ACCELERATE_USE_FSDP"):
            patch.delenv(left_behind, raising=False)
        for variable, value in {**STRATEGIES[strategy].environment, **environment}.items():
            patch.setenv(variable, value)
        if STRATEGIES[strategy].environment is AS_GPUS:
            gloo = ("gloo", accelerate.DistributedType.MULTI_GPU)
            patch.setattr(
                accelerate.PartialState, "_prepare_backend", lambda self, *args, **kwargs: gloo
            )
        patch.setattr(training_args, "is_torch_bf16_gpu_available", lambda: True)
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        try:
            yield patch
        finally:
            torch.use_deterministic_algorithms(False)
            accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def watch_of(model: Any) -> Any:
    """What looks for whole logits while a model trains, if its vocabulary tells them apart."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return WholeLogits(VOCABULARY, rows=48) if vocabulary == VOCABULARY else nullcontext()


def train_planned(folder: str, run: Run, strategy: str, name: str) -> Result:
    """A rank's training with hf_distca, or the error with which it ended."""
    how = STRATEGIES[strategy]
    output = f"{folder}/{strategy}/{name}"
    # Before the arguments: once those know of ZeRO-3, a model's parameters are drawn in another
    # way.
    unset_hf_deepspeed_config()
    model = run.make_model("distca", how.divided, f"{output}/model")
    documents = run.documents()
    forwards = []
    losses: dict[str, list[float]] = {"train": [], "eval": []}
    given = {"model": model, "train_dataset": documents, "eval_dataset": documents}
    given |= run.given(model) | run.given_planned()
    if not run.sft and "data_collator" not in given:
        given |= {"compute_metrics": of_documents, "preprocess_logits_for_metrics": chosen_tokens}
    arguments = {
        **COMMON,
        **PLANNED,
        "tokens_per_rank": 2 * TOKENS_PER_RANK // how.shares,
        **exchanging(model),
    }
    arguments |= {"output_dir": output, **run.arguments, **run.planned}
    classes: Any = (hf_distca.DistCATrainer, hf_distca.DistCATrainingArguments)
    if run.sft:
        classes = (hf_distca.DistCASFTTrainer, hf_distca.DistCASFTConfig)

    def make() -> Any:
        trainer = classes[0](args=classes[1](**with_planning(arguments)), **given)
        kernel = trainer.dispatcher.kernel
        forward = trainer.dispatcher.kernel.forward
        kernel.forward = lambda *args, **options: (forwards.append(1), forward(*args, **options))[1]
        compute_loss = trainer.compute_loss

        def noted(model: Any, *args: Any, **options: Any) -> Any:
            result = compute_loss(model, *args, **options)
            loss = result[0] if isinstance(result, tuple) else result
            losses["train" if model.training else "eval"].append(float(loss.detach()))
            return result

        trainer.compute_loss = noted
        return trainer

    looked = watch_of(model)
    with launched(strategy, run.environment) as patch:
        run.patched(patch)
        try:
            trainer, result = carry_out(
                run, make, looked, run.resumes and f"{folder}/{strategy}/{run.resumes}"
            )
        except (ValueError, ImportError, RuntimeError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        assert how.type in str(trainer.accelerator.distributed_type)
        assert getattr(looked, "shapes", []) == []
        settings = trainer.dispatcher.settings
        groups = trainer.dispatcher.groups
        result |= {
            "kernel_forwards": len(forwards),
            "losses": losses,
            "heads": {(kind.q_heads, kind.kv_heads) for kind in settings.kinds},
            "place": (groups.rank, groups.ranks),
            "after": run.after(trainer),
        }
        trainer.close()
    return result


def chosen_tokens(logits: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens with the greatest logits and the entropies, of what a model returns beside its
    loss.
    """
    values: torch.Tensor = logits[0] if isinstance(logits, tuple) else logits
    log_probs = values.double().log_softmax(-1)
    return values.argmax(-1), -(log_probs.exp() * log_probs).sum(-1)


def of_documents(evaluated: EvalPrediction) -> dict[str, float]:
    """The mean over documents of the share of their targets that a model chose, of rows that are
    not shifted. Later documents of the data set count more, so that the order counts.
    """
    chosen = evaluated.predictions[0][:, :-1]
    targets = evaluated.label_ids[:, 1:]
    counts = targets != IGNORED
    right = ((chosen == targets) & counts).sum(1) / counts.sum(1).clip(min=1)
    return {"by_document": float((right * np.arange(1, len(right) + 1)).mean() / len(right))}


def of_targets(evaluated: EvalPrediction) -> dict[str, float]:
    """The same, the share of all targets that a model chose, and the mean entropy before them."""
    (chosen, entropy) = (values[:, :-1] for values in evaluated.predictions)
    targets = evaluated.label_ids[:, 1:]
    counts = targets != IGNORED
    figures = {
        "mean_token_accuracy": (chosen == targets)[counts].mean(),
        "entropy": entropy[counts].mean(),
    }
    return {**of_documents(evaluated), **{name: float(figure) for name, figure in figures.items()}}


def train_alone(folder: str, run: Run, exact: bool = False) -> Result:
    """What the trainer of others makes of a run in one process; with `exact` in float32, from the
    same weights.
    """
    idle = run.steps_without_targets
    arguments = {
        **COMMON,
        **ALONE,
        "max_steps": 2 - idle,
        "output_dir": folder,
        **run.arguments,
        **run.alone,
    }
    unset_hf_deepspeed_config()
    model = run.make_model("sdpa", {}, folder)
    if exact:
        arguments["bf16"] = False
        model = model.float()
    documents = run.documents(without=idle * PER_MICRO_BATCH)
    given = {"model": model, "train_dataset": documents, "eval_dataset": documents}
    if not run.sft:
        given |= {
            "data_collator": pad,
            "compute_metrics": of_targets,
            "preprocess_logits_for_metrics": chosen_tokens,
        }
    given |= run.given(model)
    classes: Any = (trl.SFTTrainer, trl.SFTConfig) if run.sft else (Trainer, TrainingArguments)
    with launched("ddp", {} if exact else run.environment) as patch:
        run.patched(patch)
        _, result = carry_out(run, lambda: classes[0](args=classes[1](**arguments), **given))
    logged = {key: [0.0] * idle + values for key, values in result["logged"].items()}
    return {**result, "logged": logged}


def carry_out(
    run: Run, make: Callable[[], Any], inside: Any = None, resume: str | None = None
) -> tuple[Any, dict[str, Any]]:
    """The trainer after the run's calls; what it logged, what callbacks noted, how every trained
    weight changed.
    """
    trainer = make()
    before = {name: whole(p) for name, p in trainer.model.named_parameters() if p.requires_grad}
    if trainer.is_deepspeed_enabled and trainer.args.bf16:  # what DeepSpeed starts from
        before = {name: weight.bfloat16().float() for name, weight in before.items()}
    history: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch, inside or nullcontext():
        # NEFTune's noise, as if it were drawn alike everywhere: its scale is by the length of the
        # row.
        patch.setattr(torch.Tensor, "uniform_", lambda noise, *between: noise.fill_(0.05))
        for call in run.calls:
            known = len(trainer.state.log_history) if call == "evaluate" else 0
            if call == "new trainer":
                trainer = make()
            else:
                getattr(trainer, call)(
                    **({"resume_from_checkpoint": resume} if call == "train" else {})
                )
            history += trainer.state.log_history[known:]
    notes = [getattr(callback, "noted", {}) for callback in trainer.callback_handler.callbacks]
    # FSDP's checkpoints put a name in between.
    after = {
        name.replace("_checkpoint_wrapped_module.", ""): p
        for name, p in trainer.model.named_parameters()
    }
    return trainer, {
        "logged": {
            key: [entry[key] for entry in history if key in entry]
            for key in sorted(
                {key for entry in history for key in entry if FOLLOWED.fullmatch(key)}
            )
        },
        "learned": {name: whole(after[name]) - before[name] for name in before},
        "rounding": {name: float(2.0**-24 * weight.norm()) for name, weight in before.items()},
        "noted": {name: whole(note) for noted in notes for name, note in noted.items()},
        "history": history,
    }


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """A copy of a weight, of which ranks have shares; in float32 where the optimizer has it so."""
    if hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_full_fp32_param

        return safe_get_full_fp32_param(parameter).cpu().clone()
    tensor = parameter.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).float().clone()


def errors(result: Result, expected: Result) -> tuple[float, float]:
    """The largest relative errors: of losses; of what else is logged, learned and noted."""
    losses = [0.0]
    others = [0.0]
    assert result["logged"].keys() == expected["logged"].keys()
    for key, expected_value in expected["logged"].items():
        # An accuracy is a share of the targets: rounding decides between two equal logits.
        least = 1.0 if ACCURACY.search(key) else 1e-2 * max(expected_value)
        relative = (
            abs(a - b) / max(b, least, 1e-6)
            for a, b in zip(result["logged"][key], expected_value, strict=True)
        )
        (losses if key.endswith("loss") else others).extend(relative)
    for kind in ("learned", "noted"):
        assert result[kind].keys() == expected[kind].keys()
        least = 1e-2 * max(
            (expected_value.norm() for expected_value in expected[kind].values()), default=0.0
        )
        for name, expected_value in expected[kind].items():
            # What a weight has learned is a difference of stored weights, which may be much larger.
            rounding = result["rounding"][name] if kind == "learned" else 0.0
            difference = float((result[kind][name] - expected_value).norm())
            others.append(
                max(difference - rounding, 0.0) / float(max(expected_value.norm(), least))
            )
    return float(np.max(losses)), float(np.max(others))  # NaN if one of them is


def assert_equal(run: Run, result: Result, expected: Callable[..., Result], strategy: str) -> None:
    """A training equals that of one process, which `expected` gives, in float32 if called with
    True; or is refused.
    """
    if strategy in run.refused:
        assert run.refused[strategy] in result.get("error", "no error")
        return
    assert "error" not in result, result["error"]
    losses, others = errors(result, expected())
    if not run.rounds:
        assert losses < run.within[0]
        assert others < run.within[1]
        return
    assert losses < ROUNDING / TARGETS**0.5
    _, of_one_process = errors(expected(), expected(True))
    _, others = errors(result, expected(True))
    # FSDP2 rounds every weight before use, autocast only those of linear layers. Adam divides by
    # small gradients. Measured: 3.9 times.
    assert others < (6 if strategy == "fsdp2" else 2) * of_one_process
