"""DistCATrainer on layers as wide as those of an 8B model, beside transformers' Trainer with stock
attention.

The same micro-batches in the same order, full to the last token. Weights are in the dtype of core
attention.
"""

import gc
import random
import statistics
import tempfile
import time
from dataclasses import replace
from typing import Any

import psutil
import torch
from transformers import (
    DataCollatorWithFlattening,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import (
    is_flash_attn_2_available,
    is_flash_attn_3_available,
    is_flash_attn_4_available,
)

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.models import new_model
from benchmarks.gpu.setting import Setting
from hf_distca import DistCATrainer, DistCATrainingArguments
from hf_distca.units import AUTO

WARM_UP = 2
"""Steps that are not timed."""
GROWTH = 1.05
"""So many times the memory of the first fifth of the steps may be in use at the end."""
BOUNDS = {"loss": 5e-3, "grad_norm": 2e-2}
"""Largest differences of what stock attention and ours log, over the value."""
SMALL_CHUNKS = "256MiB"
"""Small chunk of the loss, with which "auto" is compared."""


class Watch(TrainerCallback):
    """Notes the time of every step, the bytes that are taken after it, and its loss and norm of the
    gradients.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self.seconds: list[float] = []
        self.memory: list[int] = []
        self.logged: dict[str, list[float]] = {name: [] for name in BOUNDS}
        self._begin = 0.0

    def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
        self._setting.synchronize()
        self._begin = time.perf_counter()

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        self._setting.synchronize()
        self.seconds.append(time.perf_counter() - self._begin)
        self.memory.append(memory_taken(self._setting.device))

    def on_log(
        self, _args: Any, _state: Any, _control: Any, logs: dict[str, float], **_kwargs: Any
    ) -> None:
        if "loss" in logs:
            for name, values in self.logged.items():
                values.append(float(logs[name]))


def memory_taken(device: torch.device) -> int:
    """Bytes that the allocator holds; on the CPU those of the process."""
    taken: int = (
        torch.cuda.memory_reserved(device)
        if device.type == "cuda"
        else psutil.Process().memory_info().rss
    )
    return taken


def micro_batches(setting: Setting) -> list[list[int]]:
    """Lengths of the documents of each micro-batch: drawn with a long tail, the last one cut where
    it is full.
    """
    draw, batches = random.Random(0), []
    for _ in range(setting.plans):
        lengths: list[int] = []
        while (left := setting.tokens - sum(lengths)) > 0:
            lengths.append(
                min(left, max(2, round(setting.tokens * draw.lognormvariate(-3.5, 1.5))))
            )
        batches.append(lengths)
    return batches


def tokens_of(batches: list[list[int]], vocabulary: int) -> list[list[list[int]]]:
    torch.manual_seed(0)
    return [
        [torch.randint(3, vocabulary, (length,)).tolist() for length in lengths]
        for lengths in batches
    ]


def collate(examples: list[list[list[int]]]) -> dict[str, torch.Tensor]:
    """A micro-batch of documents as stock attention takes it: packed without padding."""
    (documents,) = examples
    packed: dict[str, torch.Tensor] = DataCollatorWithFlattening()(
        [{"input_ids": each} for each in documents]
    )
    return packed


def make_model(setting: Setting, implementation: str) -> PreTrainedModel:
    config = {**setting.wide, "max_position_embeddings": setting.tokens, "use_cache": False}
    return new_model(setting, implementation, "llama", setting.dtype, config)


def arguments(setting: Setting, folder: str, steps: int) -> dict[str, Any]:
    on_cuda = setting.on_cuda
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


def train(
    setting: Setting, implementation: str, batches: list[list[list[int]]], **planned: Any
) -> Watch:
    """Train on micro-batches, with DistCATrainer and `planned` settings, or with stock attention
    and Trainer.
    """
    watch, ours = Watch(setting), implementation == "distca"
    model = make_model(setting, implementation)
    with tempfile.TemporaryDirectory() as folder:
        options = arguments(setting, folder, len(batches))
        if ours:
            documents = [{"input_ids": document} for documents in batches for document in documents]
            args = DistCATrainingArguments(tokens_per_rank=setting.tokens, **options, **planned)
            trainer: Trainer = DistCATrainer(
                model=model, args=args, train_dataset=documents, callbacks=[watch]
            )
        else:
            args = TrainingArguments(remove_unused_columns=False, **options)
            trainer = Trainer(
                model=model,
                args=args,
                train_dataset=batches,
                data_collator=collate,
                callbacks=[watch],
            )
        trainer.train()
    return watch


def check_training(setting: Setting) -> Findings:
    """Many steps with changing plans, the first of them with stock attentions too; and steps of one
    document each.

    The figure `over_ours` is the median ratio of a stock step to our step on the same documents.
    """
    findings = Findings()
    lengths_of = {
        "documents": micro_batches(setting),
        "one document": [[setting.tokens]] * setting.stock_steps,
    }
    findings.figures |= {"tokens": setting.tokens, "layers": setting.wide["num_hidden_layers"]}
    variants = findings.figures["variants"] = {}
    for what, lengths in lengths_of.items():
        batches = tokens_of(lengths, setting.wide["vocab_size"])
        with findings.trying(what):
            ours = train(setting, "distca", batches)
            findings.check(
                len(ours.seconds) == len(lengths),
                f"{len(ours.seconds)} of {len(lengths)} steps ran",
            )
            if what == "documents":
                _check_memory(findings, ours)
            variants[f"distca, {what}"] = _speed(setting, ours)
            for name in stock_attentions():
                _free()
                with findings.trying(f"{name}, {what}"):
                    try:
                        stock = train(setting, name, batches[: setting.stock_steps])
                    except torch.OutOfMemoryError as error:
                        variants[f"{name}, {what}"] = f"out of memory: {str(error)[:200]}"
                        continue
                    pairs = zip(stock.seconds[WARM_UP:], ours.seconds[WARM_UP:], strict=False)
                    over_ours = statistics.median(theirs / mine for theirs, mine in pairs)
                    variants[f"{name}, {what}"] = {**_speed(setting, stock), "over_ours": over_ours}
                    _check_logged(findings, f"{name}, {what}", ours, stock)
        _free()
    return findings


def check_loss_chunks(setting: Setting) -> Findings:
    """Steps of one document with a large vocabulary, with small chunks of the loss and with those
    that "auto" chooses.

    The figure `over_auto` is the time of a step with small chunks over the time of a step with
    "auto".
    """
    findings = Findings()
    large = replace(setting, wide={**setting.wide, "vocab_size": setting.large_vocabulary})
    batches = tokens_of([[setting.tokens]] * setting.stock_steps, setting.large_vocabulary)
    watches = {}
    for chunk_bytes in (SMALL_CHUNKS, AUTO):
        _free()
        with findings.trying(f"loss_chunk_bytes={chunk_bytes!r}"):
            if setting.on_cuda:
                torch.cuda.reset_peak_memory_stats()
            watch = watches[chunk_bytes] = train(
                large, "distca", batches, loss_chunk_bytes=chunk_bytes
            )
            findings.figures[chunk_bytes] = _speed(large, watch)
            if setting.on_cuda:
                findings.figures[chunk_bytes]["memory_peak"] = torch.cuda.max_memory_allocated()
    _free()
    if len(watches) == 2:
        small, auto = (
            findings.figures[chunk_bytes]["step_s"] for chunk_bytes in (SMALL_CHUNKS, AUTO)
        )
        findings.figures["over_auto"] = small / auto
        _check_logged(findings, "loss_chunk_bytes", watches[AUTO], watches[SMALL_CHUNKS])
    return findings


def stock_attentions() -> list[str]:
    available = {
        2: is_flash_attn_2_available,
        3: is_flash_attn_3_available,
        4: is_flash_attn_4_available,
    }
    return ["sdpa", *(f"flash_attention_{version}" for version, has in available.items() if has())]


def _check_memory(findings: Findings, watch: Watch) -> None:
    """Memory stays flat: plans change, and nothing of the earlier ones is left."""
    first = max(watch.memory[: max(1, len(watch.memory) // 5)])
    findings.figures["memory_after_first_fifth"], findings.figures["memory_at_end"] = (
        first,
        watch.memory[-1],
    )
    findings.at_most(
        watch.memory[-1] / first, GROWTH, "memory at the end over that after a fifth of the steps"
    )
    if torch.cuda.is_available():
        figures = torch.cuda.memory_stats()
        findings.figures["allocation_retries"] = figures["num_alloc_retries"]
        findings.figures["memory_peak"] = figures["allocated_bytes.all.peak"]


def _check_logged(findings: Findings, what: str, ours: Watch, stock: Watch) -> None:
    """The same micro-batches have the same losses and gradients as large, step by step."""
    for name, bound in BOUNDS.items():
        findings.check(bool(stock.logged[name]), f"{what}: no {name} was logged")
        for step, (mine, theirs) in enumerate(
            zip(ours.logged[name], stock.logged[name], strict=False)
        ):
            findings.at_most(
                abs(mine - theirs) / theirs,
                bound,
                f"{what}: difference of the {name} of step {step}",
            )


def _speed(setting: Setting, watch: Watch) -> dict[str, float]:
    step_s = statistics.median(watch.seconds[WARM_UP:] or watch.seconds)
    return {"step_s": step_s, "tokens_per_second": setting.tokens / step_s}


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
