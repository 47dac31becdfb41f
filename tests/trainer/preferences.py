"""Trainings of TRL's trainers for preferences, rewards and rollouts: stock, and with padded batches
packed.
"""

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from unittest.mock import patch

import datasets
import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import hf_distca
from hf_distca.planner import prefixes
from tests.models_and_batches import exchanging, small_model, with_planning
from tests.trainer.chats import WORDS, chats, tokenizer
from tests.trainer.comparison import QUIET, launched, whole

COMMON: dict[str, Any] = {
    **QUIET,
    "max_steps": 2,
    "bf16": False,
    "optim": "sgd",
    "learning_rate": 0.5,
    "seed": 3,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
}
PLANNED: dict[str, Any] = {"tokens_per_rank": 96, "balance_block_size": 8, "exchange_timeout": 60.0}
TIMES = re.compile(r"distca/.*|.*(time|runtime|per_second|flos).*|epoch")
"""Logged figures that no two trainings share."""


def text(random: np.random.Generator, most: int) -> str:
    return " ".join(random.choice(WORDS[:20], int(random.integers(1, most))))


def preferences(count: int = 40, most: int = 60) -> datasets.Dataset:
    """Prompts with two answers; every fifth answer is long."""
    random = np.random.default_rng(2)
    rows = []
    for number in range(count):
        longest = most if number % 5 == 0 else 12
        row = {
            "prompt": text(random, 15),
            "chosen": " " + text(random, longest),
            "rejected": " " + text(random, 20),
        }
        rows.append(row)
    return datasets.Dataset.from_list(rows)


def judged(count: int = 40) -> datasets.Dataset:
    """Prompts with an answer, wanted or not."""
    rows = [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": bool(number % 2)}
        for number, row in enumerate(preferences(count))
    ]
    return datasets.Dataset.from_list(rows)


def asked(count: int = 40) -> datasets.Dataset:
    """Prompts alone."""
    return preferences(count).select_columns("prompt")


def few_words(completions: list[str], **_: Any) -> list[float]:
    """Reward answers of different words."""
    return [len(set(answer.split())) / 10 - len(answer.split()) / 40 for answer in completions]


@dataclass(frozen=True)
class Kind:
    """A trainer of TRL."""

    name: str
    data: Callable[[], datasets.Dataset]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)
    loader: Any = AutoModelForCausalLM
    has_teacher: bool = False
    package: str = "trl"

    def classes(self, *, planned: bool) -> tuple[Any, Any]:
        if planned:
            return getattr(hf_distca, f"DistCA{self.name}Trainer"), getattr(
                hf_distca, f"DistCA{self.name}Config"
            )
        package = import_module(self.package)
        return getattr(package, f"{self.name}Trainer"), getattr(package, f"{self.name}Config")


ROLLOUTS = {"num_generations": 2, "max_completion_length": 24, "beta": 0.1}
KINDS = {
    "dpo": Kind("DPO", preferences),
    "grpo": Kind("GRPO", asked, ROLLOUTS, {"reward_funcs": few_words}),
    "rloo": Kind("RLOO", asked, ROLLOUTS, {"reward_funcs": few_words}),
    "kto": Kind("KTO", judged),
    "reward": Kind("Reward", preferences, loader=AutoModelForSequenceClassification),
}


TEACHING = {
    "distillation": Kind("Distillation", asked, {"max_completion_length": 24}, has_teacher=True),
    "gkd": Kind(
        *("GKD", chats, {"max_new_tokens": 12}),
        has_teacher=True,
        package="trl.experimental.gkd",
    ),
}
TEACHER = {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "num_hidden_layers": 3,
}
"""What the teacher has besides, so that its core attention is another kind than the student's."""


@dataclass(frozen=True)
class Case:
    """What is set in a training."""

    kind: str
    strategy: str = "ddp"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    given: Callable[[], dict[str, Any]] = dict
    model: Mapping[str, Any] = field(default_factory=dict)  # of the model's config
    planned: Mapping[str, Any] = field(default_factory=dict)  # settings of hf_distca
    evaluates: bool = False
    resumes: bool = (
        False  # whether it is trained a second time, from its checkpoint after two steps
    )


def kind_of(case: Case) -> Kind:
    return {**KINDS, **TEACHING}[case.kind]


def saved_model(folder: str, case: Case) -> str:
    """The folder of a small model that every rank can load; rank 0 saves it."""
    path = f"{folder}/model"
    if dist.get_rank() == 0:
        small_model(**case.model).save_pretrained(path)
        tokenizer().save_pretrained(path)
        kind_of(case).data().save_to_disk(f"{path}/data")
    dist.barrier()
    return path


def train(folder: str, case: Case, planned: bool, exact: bool = False) -> dict[str, Any]:
    """Logs and changed weights of a training; with `exact` in float32."""
    unset_hf_deepspeed_config()
    kind = kind_of(case)
    trainer_class = kind.classes(planned=planned)[0]
    config_class = kind.classes(planned=True)[1]
    path = saved_model(folder, case)
    # Prompts have fewer than 128 tokens, but are to be shared.
    shares = patch.multiple(prefixes, BLOCK=4, LEAST_SAVED=0.0)
    with shares, launched(case.strategy, {}), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # TRL uses transformers' earlier names
        torch.manual_seed(7)
        loading = {"dtype": "float32", "attn_implementation": "distca" if planned else "sdpa"}
        if kind.loader is AutoModelForSequenceClassification:
            loading["num_labels"] = 1
        model = kind.loader.from_pretrained(path, **loading)
        arguments = {
            **COMMON,
            **kind.arguments,
            **case.arguments,
            "output_dir": f"{folder}/{planned}",
        }
        if exact:
            arguments["bf16"] = False
        if planned:
            arguments |= {
                **PLANNED,
                **exchanging(model),
                **({"ping_pong": "auto"} if case.strategy == "zero3" else {}),
                **case.planned,
            }
            arguments = with_planning(arguments)
        data = datasets.load_from_disk(f"{path}/data")  # with files that all ranks share
        given = {
            "train_dataset": data,
            "processing_class": tokenizer(),
            **kind.given,
            **case.given(),
        }
        if kind.has_teacher:
            given["teacher_model"] = small_model(implementation="sdpa", **TEACHER)
        if case.evaluates:
            given["eval_dataset"] = data.select(range(10))
        trainer = trainer_class(model, args=config_class(**arguments), **given)
        before = {
            name: whole(weight)
            for name, weight in trainer.model.named_parameters()
            if weight.requires_grad
        }
        trainer.train()
        if case.resumes:
            trainer.train(resume_from_checkpoint=f"{arguments['output_dir']}/checkpoint-2")
        if case.evaluates:
            trainer.evaluate()
        # FSDP's checkpoints put a name in between.
        after = {
            n.replace("_checkpoint_wrapped_module.", ""): p
            for n, p in trainer.model.named_parameters()
        }
        result = {
            "history": [
                {name: value for name, value in entry.items() if not TIMES.fullmatch(name)}
                for entry in trainer.state.log_history
            ],
            "figures": [
                {k: v for k, v in entry.items() if k.startswith("distca/")}
                for entry in trainer.state.log_history
            ],
            "learned": {name: whole(after[name]) - weight for name, weight in before.items()},
            "rounding": {name: float(2.0**-24 * weight.norm()) for name, weight in before.items()},
        }
        if planned:
            trainer.close()
    return result


TIED = 1e-6
"""Margin of rewards below which they are equal but for rounding."""


def compare(
    trained: dict[str, Any], expected: dict[str, Any], within: float, besides: str = ""
) -> None:
    """Compare every weight and every logged figure, besides those whose names match."""
    assert len(trained["history"]) == len(expected["history"])
    for step, (entry, expected_value) in enumerate(
        zip(trained["history"], expected["history"], strict=True)
    ):
        assert entry.keys() == expected_value.keys()
        for name, value in expected_value.items():
            # While the policy is its reference, rounding decides which reward is larger.
            margin = name.replace("accuracies", "margins")
            if name != margin and max(abs(entry[margin]), abs(expected_value[margin])) < TIED:
                continue
            if isinstance(value, int | float) and not re.fullmatch(besides, name):
                assert abs(entry[name] - value) <= within * max(abs(value), 0.01), (
                    step,
                    name,
                    entry[name],
                    value,
                )
    assert trained["learned"].keys() == expected["learned"].keys()
    for name, expected_value in expected["learned"].items():
        difference = float((trained["learned"][name] - expected_value).norm())
        # What a weight has learned is a difference of stored weights, which may be much larger.
        allowed = within * max(float(expected_value.norm()), 1e-3) + expected["rounding"][name]
        assert difference <= allowed, (name, difference, float(expected_value.norm()))


def compare_with_stock(
    folder: str, case: Case, within: float, besides: str = ""
) -> list[dict[str, Any]]:
    """Figures of all logs of a training that was compared with TRL's own trainer on all ranks."""
    expected = train(folder, case, planned=False)
    trained = train(folder, case, planned=True)
    compare(trained, expected, within, besides)
    return list(trained["figures"])
