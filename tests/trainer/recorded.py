"""Recorded rollouts for asynchronous GRPO, and stand-ins for what makes them and takes weights."""

import queue
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    packing,
)
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

import hf_distca
from hf_distca.planner import prefixes
from tests.models_and_batches import exchanging, small_model, with_planning
from tests.trainer.chats import tokenizer
from tests.trainer.comparison import QUIET, launched, whole
from tests.trainer.preferences import asked

BLOCK = 4
"""Tokens of a block in these tests: prefixes are short."""
VOCABULARY = 64
MOST = 120
"""Tokens of a long rollout of a group."""
SPARE = 4
"""Rows that a recorded step leaves free: TRL has one more row at each fork."""
Sample = dict[str, Any]


def unique_rows(samples: Iterable[Sample], block: int = BLOCK) -> int:
    """Rows of samples in which equal blocks from the first one on come once."""
    rows = {}
    for sample in samples:
        tokens = tuple(sample["input_ids"].tolist())
        for start in range(0, len(tokens), block):
            rows[tokens[: start + block]] = len(tokens[start : start + block])
    return sum(rows.values())


def rollout(random: np.random.Generator, before: list[int], length: int, group: int) -> Sample:
    """A rollout of several turns: what a tool says is no target, and answers are.

    Args:
        before: tokens that it has in common with others.
        length: of the whole.
    """
    own = random.integers(5, VOCABULARY, max(length - len(before), 1)).tolist()
    tokens = np.array(before + own, np.int64)
    mask = np.zeros(len(tokens), np.int64)
    # Answers of five tokens, and what is said in between; also in the common part.
    mask[(np.arange(len(tokens)) // 5) % 2 == 1] = 1
    mask[:3] = 0
    mask[-1] = 1
    log_probs = np.where(mask, random.normal(-4.2, 0.4, len(tokens)), 0.0)
    reward = float(random.normal())
    metrics = {"reward": reward, "rewards/judge": reward}
    if group % 3 == 0:
        metrics["tools/call_frequency"] = float(random.random())
    return {
        "input_ids": tokens,
        "completion_mask": mask,
        "old_log_probs": log_probs.astype(np.float32),
        "advantage": float(random.normal()),
        "group_id": group,
        "metrics": metrics,
    }


def recording(steps: int, capacity: int, longest: int, seed: int = 0) -> list[list[Sample]]:
    """Rollouts of each step, which fill a micro-batch of `capacity` rows.

    The first rollout of a step does not fit into the step before, whether equal tokens are shared
    one by one, as TRL does, or in blocks. One step has a rollout of `longest` tokens.
    """
    random = np.random.default_rng(seed)
    group = 0
    recorded = []
    for step in range(steps):
        samples = [rollout(random, [], 48, group)]
        if step == steps // 2:
            samples = [rollout(random, [], longest, group)]
        while True:
            group += 1
            prompt = random.integers(5, VOCABULARY, int(random.integers(9, 30))).tolist()
            first = rollout(random, prompt, int(random.integers(30, MOST)), group)
            fork = first["input_ids"][: int(0.7 * len(first["input_ids"]))].tolist()
            members = [first, rollout(random, fork, len(first["input_ids"]) + 9, group)]
            members.append(rollout(random, prompt, int(random.integers(30, MOST)), group))
            if group % 4 == 0:
                members.append({**members[1], "advantage": -0.5})  # the same tokens
            if unique_rows([*samples, *members]) > capacity - SPARE - 8:
                break
            samples += members
        samples.append(rollout(random, [], capacity - SPARE - unique_rows(samples), group))
        group += 1
        recorded.append(samples)
    return recorded


class RecordedWorker:
    """A worker of TRL's protocol that gives recorded rollouts, all at once."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self.versions: list[int] = []
        for sample in samples:
            self.rollout_buffer.put(
                RolloutSample(prompt=[], completion=[], model_version=0, **sample)
            )

    def start(self) -> None:
        self.metrics_queue.put({"rollout/tokens_total": 7.0})

    def stop(self) -> None:
        pass

    def update_model_version(self, model_version: int) -> None:
        self.versions.append(model_version)

    def check_health(self, stale_after_s: float) -> None:
        raise RuntimeError("the recording has ended")


class KeptWeights:
    """A transfer of weights of TRL's protocol that keeps the last weights."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.weights: dict[str, Tensor] = {}

    def init_weight_transfer(self) -> None:
        self.calls.append("init")

    def pause(self) -> None:
        self.calls.append("pause")

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        self.weights = {name: weight.detach().clone() for name, weight in iterator}
        self.calls.append("send")

    def resume(self) -> None:
        self.calls.append("resume")

    def destroy(self) -> None:
        self.calls.append("destroy")


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    *_: int,
    softmax_scale: float,
    window_size: tuple[int, int],
    **__: Any,
) -> Tensor:
    """FlashAttention's function for TRL's segments and their paths, on the CPU."""
    parts = []
    groups = query.shape[1] // key.shape[1]
    q_bounds, k_bounds = pairwise(cu_q.tolist()), pairwise(cu_k.tolist())
    for (q_start, q_stop), (k_start, k_stop) in zip(q_bounds, k_bounds, strict=True):
        q, k, v = (
            part.transpose(0, 1)
            for part in (
                query[q_start:q_stop],
                key[k_start:k_stop].repeat_interleave(groups, 1),
                value[k_start:k_stop].repeat_interleave(groups, 1),
            )
        )
        row = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        column = torch.arange(k.shape[1])
        seen = column <= row
        if window_size[0] >= 0:
            seen &= column >= row - window_size[0]
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=softmax_scale
        )
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


@contextmanager
def trl_on_cpu() -> Iterator[None]:
    """Let TRL's trainer run on a CPU.

    Its kernel of attention runs on GPUs alone, and it asks CUDA for the speed of the device.
    """
    kernel = SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    with (
        patch.object(packing, "_flash_attn", lambda: kernel),
        patch.object(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None),
    ):
        yield


# Trainings

RANKS, TOKENS_PER_RANK = 3, 96
CAPACITY = RANKS * TOKENS_PER_RANK
LONGEST = 5 * TOKENS_PER_RANK // 2
WITHIN = 1e-4
"""Largest relative difference of a logged figure or of what a weight has learned, in float32."""
OTHER_FIGURES = re.compile(
    r"distca/.*|perf/.*|.*(time|runtime|per_second|flos).*|epoch|sample/(rollout_queue_size|staleness.*)"
    r"|batch/(row.*|packing_ratio|samples_per_row|pad_frac|forwarded_tokens_per_step)"
)
"""Figures of time, and of the rows and trees of a rank."""
AHEAD = re.compile(r"sample/.*|reward.*|tools/.*|batch/(masked_token_frac|groups_per_step)")
"""Figures of rollouts, which are logged when a loader has read them."""
COMMON: dict[str, Any] = {
    **QUIET,
    "bf16": False,
    "optim": "sgd",
    "learning_rate": 0.2,
    "seed": 3,
    "max_staleness": 1000,
    "epsilon": 0.2,
    "epsilon_high": 0.3,
}


@dataclass(frozen=True)
class Case:
    """What is set in a training."""

    steps: int
    strategy: str = "ddp"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    given: Callable[[], dict[str, Any]] = dict
    model: Mapping[str, Any] = field(default_factory=dict)  # of the model's config
    is_loaded: bool = False  # whether hf_distca's trainer gets a loaded model

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Recorded rollouts, and two more micro-batches: TRL's loader reads one ahead."""
        micro_batches = self.steps * self.arguments.get("gradient_accumulation_steps", 1)
        return list(chain(*recording(micro_batches + 2, CAPACITY, LONGEST)))


def train(folder: str, case: Case, planned: bool) -> dict[str, Any]:
    """Logs and changed weights of a training, and the weights that the inference server got."""
    path = f"{folder}/model"
    if dist.get_rank() == 0:
        small_model(**case.model).save_pretrained(path)
        tokenizer().save_pretrained(path)
    dist.barrier()
    shares = patch.multiple(prefixes, BLOCK=BLOCK, LEAST_SAVED=0.0)
    stand_ins = nullcontext() if planned else trl_on_cpu()
    with shares, launched(case.strategy, {}), stand_ins, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # TRL uses transformers' earlier names
        arguments = {
            **COMMON,
            **case.arguments,
            "max_steps": case.steps,
            "output_dir": f"{folder}/{planned}",
        }
        transfer = KeptWeights()
        given = {
            "train_dataset": asked(),
            "processing_class": tokenizer(),
            "rollout_worker": RecordedWorker(case.samples),
            "weight_transfer": transfer,
            **case.given(),
        }
        if planned:
            arguments |= {
                "tokens_per_rank": CAPACITY // dist.get_world_size(),
                "balance_block_size": 8,
                **exchanging(small_model(**case.model)),
            }
            args = hf_distca.DistCAAsyncGRPOConfig(**with_planning(arguments))
            model = AutoModelForCausalLM.from_pretrained(path) if case.is_loaded else path
            trainer: Any = hf_distca.DistCAAsyncGRPOTrainer(model, args=args, **given)
        else:
            args = AsyncGRPOConfig(**arguments, token_budget=CAPACITY)
            trainer = AsyncGRPOTrainer(path, args=args, **given)
        before = {name: whole(weight) for name, weight in trainer.model.named_parameters()}
        trainer.train()
        after = {
            name.replace("_checkpoint_wrapped_module.", ""): whole(weight)
            for name, weight in trainer.model.named_parameters()
        }
        result = {
            "history": trainer.state.log_history,
            "learned": {name: after[name] - weight for name, weight in before.items()},
            "rounding": {name: 2.0**-24 * float(weight.norm()) for name, weight in before.items()},
            "after": after,
            "sent": transfer.weights,
            "calls": transfer.calls,
        }
        if planned:
            if case.strategy == "ddp":
                result["generated"] = generated(trainer.model)
            trainer.save_model(f"{folder}/saved")
            trainer.close()
    return result


def generated(model: Any) -> Tensor:
    """Tokens that a model generates."""
    tokens: Tensor = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=False)
    return tokens


def compare(trained: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare every weight and every logged figure.

    TRL's loader is one micro-batch ahead of the training: it logs figures of the rollouts of the
    next step.
    """
    ours, stock = trained["history"], expected["history"]
    one_a_step = stock[0]["batch/microbatches_per_step"] == 1
    assert len(ours) == len(stock)
    for step, entry in enumerate(stock):
        for name, value in entry.items():
            ahead = 1 if AHEAD.fullmatch(name) else 0
            if OTHER_FIGURES.fullmatch(name) or not isinstance(value, int | float):
                continue
            # The first log has two micro-batches, and a step may have several.
            if ahead and not (0 < step < len(stock) - 2 and one_a_step):
                continue
            got = ours[step + ahead][name]
            assert abs(got - value) <= WITHIN * max(abs(value), 0.01), (step, name, got, value)
    compare_weights(trained["learned"], expected["learned"], trained["rounding"])
    compare_weights(trained["sent"], expected["sent"])
    assert trained["calls"] == expected["calls"]


def compare_weights(
    trained: dict[str, Tensor], expected: dict[str, Tensor], rounding: Mapping[str, float] = {}
) -> None:
    """Compare weights, or what they have learned, which is rounded like the weights."""
    assert trained.keys() == expected.keys()
    for name, expected_value in expected.items():
        difference = float((trained[name] - expected_value).norm())
        allowed = WITHIN * max(float(expected_value.norm()), 1e-3) + rounding.get(name, 0.0)
        assert difference <= allowed, (name, difference, float(expected_value.norm()))
