"""DistCATrainer on layers as wide as those of an 8B model, beside transformers' Trainer with stock attention.

The same micro-batches in the same order, full to the last token. Weights are in the dtype of core attention.
"""

import gc
import os
import random
import statistics
import tempfile
import time
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.models import new_model
from benchmarks.gpu.setting import Setting
from hf_distca import DistCATrainer, DistCATrainingArguments
from hf_distca.planner.cost import pairs

WARM_UP = 2
"""Steps that are not timed."""
GROWTH = 1.05
"""So many times the memory of the first fifth of the steps may be in use at the end."""
BOUNDS = {"loss": 5e-3, "grad_norm": 2e-2}
"""Largest differences of what stock attention and ours log, over the value."""
FORWARDS = 3
"""A backward takes two forwards' operations."""


class Watch(TrainerCallback):
    """Notes the time and the memory of every step, and what is logged of it.

    Attributes:
        seconds: by step.
        memory: bytes that are taken after each step.
        logged: by name, loss and norm of the gradients by step.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self.seconds: list[float] = []
        self.memory: list[int] = []
        self.logged: dict[str, list[float]] = {name: [] for name in BOUNDS}
        self._begin = 0.0

    def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
        """Start the clock."""
        self._setting.synchronize()
        self._begin = time.perf_counter()

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        """Stop the clock."""
        self._setting.synchronize()
        self.seconds.append(time.perf_counter() - self._begin)
        self.memory.append(memory_taken(self._setting.device))

    def on_log(self, _args: Any, _state: Any, _control: Any, logs: dict[str, float], **_kwargs: Any) -> None:
        """Take the loss and the norm."""
        if "loss" in logs:
            for name, values in self.logged.items():
                values.append(float(logs[name]))


def memory_taken(device: torch.device) -> int:
    """Bytes that the allocator holds; on the CPU those of the process."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def micro_batches(setting: Setting) -> list[list[int]]:
    """Lengths of the documents of each micro-batch: drawn with a long tail, the last one cut where it is full."""
    draw, batches = random.Random(0), []
    for _ in range(setting.plans):
        lengths: list[int] = []
        while (left := setting.tokens - sum(lengths)) > 0:
            lengths.append(min(left, max(2, round(setting.tokens * draw.lognormvariate(-3.5, 1.5)))))
        batches.append(lengths)
    return batches


def tokens_of(batches: list[list[int]], vocabulary: int) -> list[list[list[int]]]:
    """Token ids of the documents of each micro-batch."""
    torch.manual_seed(0)
    return [[torch.randint(3, vocabulary, (length,)).tolist() for length in lengths] for lengths in batches]


def collate(examples: list[list[list[int]]]) -> dict[str, torch.Tensor]:
    """A micro-batch of documents as stock attention takes it: packed without padding."""
    (documents,) = examples
    ids = [token for document in documents for token in document]
    positions = [position for document in documents for position in range(len(document))]
    # Trainer shifts labels; the first token of a document is nobody's target.
    labels = [token if position else -100 for token, position in zip(ids, positions, strict=True)]
    columns = {"input_ids": ids, "position_ids": positions, "labels": labels}
    return {name: torch.tensor([column]) for name, column in columns.items()}


def make_model(setting: Setting, implementation: str) -> PreTrainedModel:
    """The model; the same weights every time."""
    config = {**setting.wide, "max_position_embeddings": setting.tokens, "use_cache": False}
    return new_model(setting, implementation, "llama", setting.dtype, config)


def arguments(setting: Setting, folder: str, steps: int) -> dict[str, Any]:
    """What both trainers are told."""
    on_cuda = setting.device.type == "cuda"
    return {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": 1,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused" if on_cuda else "adamw_torch",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": not on_cuda,
        "train_sampling_strategy": "sequential",
        "dataloader_num_workers": 1 if on_cuda else 0,
        "dataloader_pin_memory": on_cuda,
        "seed": 0,
    }


def train_ours(setting: Setting, batches: list[list[list[int]]]) -> tuple[Watch, list[dict[str, float]]]:
    """Train on micro-batches with DistCATrainer; returns what was seen, and what was logged."""
    watch = Watch(setting)
    with tempfile.TemporaryDirectory() as folder:
        trainer = DistCATrainer(
            model=make_model(setting, "distca"),
            args=DistCATrainingArguments(tokens_per_rank=setting.tokens, **arguments(setting, folder, len(batches))),
            train_dataset=[{"input_ids": document} for documents in batches for document in documents],
            callbacks=[watch],
        )
        trainer.train()
    return watch, [entry for entry in trainer.state.log_history if "distca/tokens_per_second" in entry]


def train_stock(setting: Setting, implementation: str, batches: list[list[list[int]]]) -> Watch:
    """Train on micro-batches with transformers' Trainer."""
    watch = Watch(setting)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=make_model(setting, implementation),
            args=TrainingArguments(remove_unused_columns=False, **arguments(setting, folder, len(batches))),
            train_dataset=batches,
            data_collator=collate,
            callbacks=[watch],
        )
        trainer.train()
    return watch


def check_training(setting: Setting) -> Findings:
    """Many steps with changing plans; the first of them with stock attentions; and steps of one document each."""
    findings = Findings()
    lengths = micro_batches(setting)
    batches = tokens_of(lengths, setting.wide["vocab_size"])
    single = tokens_of([[setting.tokens]] * setting.stock_steps, setting.wide["vocab_size"])
    figures = findings.figures
    figures |= {"tokens": setting.tokens, "layers": setting.wide["num_hidden_layers"], "ways": {}}

    with findings.trying("documents"):
        watch, logged = train_ours(setting, batches)
        findings.check(
            len(watch.seconds) == setting.plans, f"{len(watch.seconds)} steps ran, {setting.plans} were expected"
        )
        _check_memory(findings, watch)
        figures["imbalance_degree"] = logged[-1]["distca/imbalance_degree"]
        figures["ways"]["distca, documents"] = _speed(setting, watch, lengths)
        _beside(setting, findings, "documents", watch, batches[: setting.stock_steps], lengths)
    with findings.trying("one document"):
        watch, _ = train_ours(setting, single)
        lengths = [[setting.tokens]] * setting.stock_steps
        figures["ways"]["distca, one document"] = _speed(setting, watch, lengths)
        _beside(setting, findings, "one document", watch, single, lengths)
    return findings


def _beside(
    setting: Setting,
    findings: Findings,
    what: str,
    ours: Watch,
    batches: list[list[list[int]]],
    lengths: list[list[int]],
) -> None:
    """The same steps with stock attentions: their speeds, and that they log what ours does."""
    for name in stock_attentions():
        _free()
        with findings.trying(f"{name}, {what}"):
            try:
                stock = train_stock(setting, name, batches)
            except torch.OutOfMemoryError as error:
                findings.figures["ways"][f"{name}, {what}"] = f"out of memory: {str(error)[:200]}"
                continue
            findings.figures["ways"][f"{name}, {what}"] = _speed(setting, stock, lengths)
            _check_logged(findings, f"{name}, {what}", ours, stock)
    _free()


def stock_attentions() -> list[str]:
    """Those of transformers that run here."""
    from transformers.utils import is_flash_attn_2_available

    return ["sdpa", *(["flash_attention_2"] if is_flash_attn_2_available() else [])]


def _check_memory(findings: Findings, watch: Watch) -> None:
    """Memory stays flat: plans change, and nothing of the earlier ones is left."""
    first = max(watch.memory[: max(1, len(watch.memory) // 5)])
    findings.figures["memory_after_first_fifth"], findings.figures["memory_at_end"] = first, watch.memory[-1]
    findings.at_most(watch.memory[-1] / first, GROWTH, "memory at the end over that after a fifth of the steps")
    if torch.cuda.is_available():
        figures = torch.cuda.memory_stats()
        findings.figures["allocation_retries"] = figures["num_alloc_retries"]
        findings.figures["memory_peak"] = figures["allocated_bytes.all.peak"]


def _check_logged(findings: Findings, what: str, ours: Watch, stock: Watch) -> None:
    """The same micro-batches have the same losses and gradients as large, step by step."""
    for name, bound in BOUNDS.items():
        findings.check(bool(stock.logged[name]), f"{what}: no {name} was logged")
        for step, (mine, theirs) in enumerate(zip(ours.logged[name], stock.logged[name], strict=False)):
            findings.at_most(abs(mine - theirs) / theirs, bound, f"{what}: difference of the {name} of step {step}")


def _speed(setting: Setting, watch: Watch, lengths: list[list[int]]) -> dict[str, float]:
    """Medians over the steps after the first ones: seconds, tokens and 10¹² operations of the model a second."""
    wide = setting.wide
    width = wide["num_attention_heads"] * wide["head_dim"]
    kv_width = wide["num_key_value_heads"] * wide["head_dim"]
    hidden, layers = wide["hidden_size"], wide["num_hidden_layers"]
    weights = layers * hidden * (2 * width + 2 * kv_width + 3 * wide["intermediate_size"])
    weights += hidden * wide["vocab_size"]
    steps = list(zip(watch.seconds, lengths, strict=False))[WARM_UP:] or list(
        zip(watch.seconds, lengths, strict=False)
    )
    rates = []
    for seconds, documents in steps:
        seen = sum(pairs(0, length) for length in documents)
        flops = FORWARDS * (2 * weights * sum(documents) + 4 * width * layers * seen)
        rates.append(flops / seconds / 1e12)
    seconds = [seconds for seconds, _ in steps]
    return {
        "step_s": statistics.median(seconds),
        "tokens_per_second": setting.tokens / statistics.median(seconds),
        "model_tflops": statistics.median(rates),
    }


def _free() -> None:
    """Give the memory of the last model back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
