"""Trainers of the same documents, each in the way of one peer, halted between optimizer steps.

Core attention of packed rows is the CPU kernel of hf_distca for all of them, behind transformers' attention interface:
what FlashAttention is on GPUs, which transformers has no stand-in for on CPUs.

Shape suffixes: B rows of a padded batch, T tokens, H heads, D head dim.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from harness.models import attend_packed, documents_of, llama
from harness.resident import begin_peak, follow_tensors, peak
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from hf_distca import DistCATrainer, DistCATrainingArguments
from hf_distca.kernels import TaskShapes, get_kernel
from hf_distca.planner.cost import pairs

SIZES = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2, "num_attention_heads": 4}
PACKED = "documents_by_position"
"""Attention implementation of rows whose documents are told by their positions."""
KERNEL = get_kernel("auto", torch.device("cpu"))


@lru_cache(maxsize=64)
def _shapes(lengths: tuple[int, ...]) -> TaskShapes:
    return TaskShapes.build(lengths, lengths, "cpu")


def document_lengths(positions: Tensor) -> tuple[int, ...]:
    """Lengths of the documents of a packed row, which begin where positions [T] are 0."""
    starts = torch.nonzero(positions == 0).flatten().tolist()
    return tuple(stop - start for start, stop in zip(starts, [*starts[1:], len(positions)], strict=True))


def attention_of_documents(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    scaling: float,
    position_ids: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each document of a packed row, which positions tell."""
    return attend_packed(KERNEL, _shapes(document_lengths(position_ids[0])), scaling, query, key, value)


AttentionInterface.register(PACKED, attention_of_documents)


@dataclass
class Computed:
    """Query-key pairs of one head and layer that a rank's batches asked for since `take`.

    Attributes:
        pairs: how many.
    """

    pairs: float = 0.0

    def flattened(self, collate: Callable[..., Any]) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
        """The collator, with the pairs of whole documents counted."""

        def counted(examples: list[dict[str, Any]]) -> dict[str, Any]:
            self.pairs += sum(pairs(0, len(example["input_ids"])) for example in examples)
            return collate(examples)

        return counted

    def padded(self, collate: Callable[..., Any]) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
        """The collator, with the pairs of rows padded to the longest counted."""

        def counted(examples: list[dict[str, Any]]) -> dict[str, Any]:
            longest = max(len(example["input_ids"]) for example in examples)
            self.pairs += len(examples) * pairs(0, longest)
            return collate(examples)

        return counted

    def take(self) -> float:
        """The number, which begins anew."""
        taken, self.pairs = self.pairs, 0.0
        return taken


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        lengths: of the documents of every optimizer step, their number divisible by that of the ranks.
        steps: that will be asked for.
        folder: for output.
    """

    lengths: Sequence[int]
    steps: int
    folder: str

    @property
    def data(self) -> list[dict[str, list[int]]]:
        """The documents."""
        return [{"input_ids": document.tolist()} for document in documents_of(self.lengths)]

    @property
    def arguments(self) -> dict[str, Any]:
        """Of transformers' trainer; one epoch is one optimizer step."""
        return {
            "output_dir": self.folder,
            "num_train_epochs": self.steps,
            "learning_rate": 1e-4,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            "ddp_find_unused_parameters": False,
        }

    def model(self, attention: str) -> nn.Module:
        """The same weights every time."""
        return llama(max(self.lengths), attention, **SIZES)


def flattened(case: Case, ranks: int, strategy: str = "random") -> "Halted":
    """Plain DDP, documents of a rank packed without padding by DataCollatorWithFlattening.

    Args:
        case: what is trained.
        ranks: how many.
        strategy: `train_sampling_strategy`: which documents a rank gets.
    """
    computed = Computed()
    args = TrainingArguments(
        **case.arguments,
        use_cpu=True,
        per_device_train_batch_size=len(case.lengths) // ranks,
        train_sampling_strategy=strategy,
    )
    collate = computed.flattened(DataCollatorWithFlattening())
    return Halted(
        Trainer(model=case.model(PACKED), args=args, train_dataset=case.data, data_collator=collate), computed
    )


def rebalanced(case: Case, ranks: int) -> "Halted":
    """batch_rebalance, documents packed without padding."""
    return flattened(case, ranks, "batch_rebalance")


def rebalanced_padded(case: Case, ranks: int) -> "Halted":
    """batch_rebalance as its cost model has it: rows padded to the longest of a rank, attention by sdpa."""
    words = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]"))
    collate = DataCollatorForLanguageModeling(
        PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", padding_side="right"), mlm=False
    )
    computed = Computed()
    args = TrainingArguments(
        **case.arguments,
        use_cpu=True,
        per_device_train_batch_size=len(case.lengths) // ranks,
        train_sampling_strategy="batch_rebalance",
    )
    trainer = Trainer(
        model=case.model("sdpa"), args=args, train_dataset=case.data, data_collator=computed.padded(collate)
    )
    return Halted(trainer, computed)


def planned(case: Case, ranks: int) -> "Halted":
    """hf_distca with its defaults, documents in the order of the data, which fill each step.

    An epoch has all steps: the process that loads ahead, which is a default, starts once an epoch.
    """
    args = DistCATrainingArguments(
        **{**case.arguments, "num_train_epochs": 1},
        use_cpu=True,
        train_sampling_strategy="sequential",
        tokens_per_rank=-(-sum(case.lengths) // ranks),
    )
    data = case.data * (case.steps + 1)
    return Halted(DistCATrainer(model=case.model("distca"), args=args, train_dataset=data), None)


def use_deepspeed() -> None:
    """Let accelerate train with DeepSpeed, ZeRO off, as its launcher would say.

    With TrainingArguments' `deepspeed` transformers leaves `ddp_backend` out, without which accelerate has no backend
    for CPUs, takes every process for the only one, and gives all of them the same documents.
    """
    os.environ.update(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_ZERO_STAGE="0")


def ulysses(case: Case, ranks: int, attention: str = PACKED, in_two_rows: bool = False) -> "Halted":
    """Ulysses sequence parallelism of DeepSpeed through accelerate, ZeRO off, rows of packed documents.

    All ranks share every row, a rank has an equal part of its tokens, and in attention all of them of its share of the
    heads. Loaders of as many ranks make as many rows, which are computed one after another.

    Args:
        case: what is trained; the tokens of every row must be a multiple of the ranks.
        ranks: how many.
        attention: implementation that is given the whole row.
        in_two_rows: whether the first document of a step has a row of its own. gloo needs rows of equal length.
    """
    use_deepspeed()
    flatten, data = DataCollatorWithFlattening(), case.data
    parts = [data[:1], data[1:]] if in_two_rows else [data]
    packed = [{name: column[0] for name, column in flatten(part).items()} for part in parts]
    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
    handler.sp_attn_implementation = attention  # accelerate takes few names, DeepSpeed any that is registered
    args = TrainingArguments(
        **{**case.arguments, "num_train_epochs": 1},
        ddp_backend="gloo",
        train_sampling_strategy="sequential",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=len(parts),
        parallelism_config=ParallelismConfig(sp_size=ranks, sp_backend="deepspeed", sp_handler=handler),
    )
    trainer = Trainer(
        model=case.model(attention),
        args=args,
        train_dataset=packed * (-(-case.steps // ranks) * ranks),
        data_collator=default_data_collator,
    )
    return Halted(trainer, None)


class Halted(TrainerCallback):
    """A trainer that trains in a thread of its own, one optimizer step at a time.

    Args:
        trainer: that logs in every step.
        computed: pairs of its batches; None where the trainer tells or knows the imbalance.
    """

    def __init__(self, trainer: Trainer, computed: Computed | None) -> None:
        self.trainer, self.computed = trainer, computed
        self._go: queue.Queue[None] = queue.Queue()
        self._said: queue.Queue[dict[str, float] | BaseException] = queue.Queue()
        trainer.add_callback(self)
        trainer.remove_callback(PrinterCallback)
        self._thread = threading.Thread(target=self._train, daemon=True)

    def _train(self) -> None:
        torch.set_num_threads(1)  # a number of the thread, not of the process
        try:
            self.trainer.train()
        except BaseException as error:
            self._said.put(error)

    def on_train_begin(self, *_args: Any, **_kwargs: Any) -> None:
        """Wait for the first step."""
        self._go.get()

    def on_log(self, _args: Any, _state: Any, _control: Any, logs: dict[str, float], **_: Any) -> None:
        """Say what a step's log says, and wait for the next one."""
        if "loss" in logs:
            self._said.put(dict(logs))
            self._go.get()

    def step(self) -> tuple[float, dict[str, float]]:
        """Seconds of a step, from documents to updated weights on all ranks, and its log."""
        if self._thread.ident is None:  # not earlier: arguments of a further trainer reset what accelerate knows
            self._thread.start()
        dist.barrier()
        begin = time.perf_counter()
        self._go.put(None)
        said = self._said.get()
        if isinstance(said, BaseException):
            raise said
        dist.barrier()
        return time.perf_counter() - begin, said

    def step_memory(self) -> float:
        """MiB that the process holds at most in a step above what it holds before."""
        follow_tensors()
        before = begin_peak()
        self.step()
        return (peak() - before) / 2**20
