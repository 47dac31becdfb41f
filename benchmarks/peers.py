"""Beside peers: the same documents in every optimizer step, on 2 and 4 CPU ranks, with five
strategies.

Each strategy is a trainer (transformers' Trainer, or DistCATrainer) of the same 2-layer LLaMA of
hidden size 256, float32, AdamW, gradients clipped at 1, one thread a rank, gloo. A step has 16
documents, by default of 16384 tokens together: one of half of the tokens with short ones, or a long
tail. It takes loading, collating, planning, both passes, the update and its log; it is an epoch
where documents are shuffled, and else one of an epoch's equal steps.

  flattened           DDP, DataCollatorWithFlattening; a rank gets its share of the documents at
                      random, the default
  rebalanced          the same with train_sampling_strategy="batch_rebalance"
  rebalanced, padded  batch_rebalance with rows padded to the longest of a rank, as its cost model
                      has it; sdpa
  Ulysses             DeepSpeed's sequence parallelism through accelerate, ZeRO off; all documents
                      in one row, packed beforehand, on all ranks
  hf_distca           DistCATrainer with its defaults, tokens_per_rank as small as holds the
                      documents

Core attention of packed rows is the CPU kernel of hf_distca in all strategies, behind transformers'
attention interface; it skips what documents do not attend to, as FlashAttention does on GPUs.
"sdpa" alone would build a mask of all tokens by all tokens there. Every strategy takes the mean
over all targets of a step; Ulysses does where a step is one row, and else takes the mean of the
means of rows, which is shown for two. Losses of every step are compared.

Time on this machine shows little of balance on 4 ranks: 2 cores are shared by 4 ranks, so that work
on all of them adds up and a rank that waits costs nothing. `imbalance` does not depend on that:
query-key pairs of the busiest rank over the mean, padding counted where it is computed; Ulysses
divides heads, which are alike. Memory is the most that a rank's process held in a step above what
it held before it, of the rank with the most, without weights and optimizer states.

Run: OMP_NUM_THREADS=1 python benchmarks/peers.py [--rounds 6] [--tokens 16384]
"""

import os
import queue
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from harness import Ranks, Round, begin_peak, follow_tensors, options_parser, over, peak, report
from harness.models import attend_packed, document_lengths, documents_of, llama
from harness.rounds import Measured
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
from hf_distca.plan.cost import pairs

RANKS = (2, 4)
TOKENS = 16384
MIXES = {
    "one long": [8192, *[544] * 14, 576],
    "long tail": [
        5248,
        2816,
        1792,
        1408,
        1024,
        832,
        768,
        608,
        480,
        384,
        288,
        224,
        192,
        128,
        96,
        96,
    ],
}
"""Tokens of the documents of a step, of TOKENS in all; multiples of 32."""
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
PACKED = "documents_by_position"
"""Attention implementation for rows in which positions mark the documents."""
KERNEL = get_kernel("auto", torch.device("cpu"))
Examples = list[dict[str, Any]]
Figures = dict[str, dict[str, Any]]
"""Figures of a rank, by mix and strategy."""


@lru_cache(maxsize=64)
def shapes_of(lengths: tuple[int, ...]) -> TaskShapes:
    return TaskShapes.build(lengths, lengths, "cpu")


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
    """Causal attention within each document of a packed row; positions mark the documents."""
    return attend_packed(
        KERNEL, shapes_of(document_lengths(position_ids[0])), scaling, query, key, value
    )


AttentionInterface.register(PACKED, attention_of_documents)


class Counted:
    """A collator that counts the query-key pairs, of one head and layer, that its batches ask for
    in `pairs`.
    """

    def __init__(self, collate: Callable[[Examples], Any], *, padded: bool) -> None:
        self._collate = collate
        self._padded = padded
        self.pairs = 0

    def __call__(self, examples: Examples) -> Any:
        """A batch; rows that are padded count as long as the longest."""
        lengths = [len(example["input_ids"]) for example in examples]
        self.pairs += sum(pairs(0, max(lengths) if self._padded else length) for length in lengths)
        return self._collate(examples)


@dataclass(frozen=True)
class Case:
    """A training: the documents of every optimizer step, in number divisible by the ranks; and its
    steps.
    """

    lengths: Sequence[int]
    steps: int
    folder: str

    @property
    def data(self) -> Examples:
        return [{"input_ids": document.tolist()} for document in documents_of(self.lengths)]

    def arguments(self, **others: Any) -> dict[str, Any]:
        """Arguments of transformers' trainer; one epoch is one optimizer step by default."""
        usual = {
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
        return {**usual, **others}

    def model(self, attention: str) -> nn.Module:
        return llama(max(self.lengths), attention, **SIZES)


Makers = dict[str, Callable[[Case, int], "Halted"]]
"""By strategy, what makes its trainer for a case and a number of ranks."""


def data_parallel(
    case: Case, ranks: int, strategy: str = "random", *, padded: bool = False
) -> "Halted":
    """Plain DDP, documents of a rank packed without padding, or rows padded to the longest of the
    rank.
    """
    words = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", padding_side="right"
    )
    pad = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    collate = Counted(pad if padded else DataCollatorWithFlattening(), padded=padded)
    batch_size = len(case.lengths) // ranks
    args = TrainingArguments(
        **case.arguments(
            use_cpu=True, per_device_train_batch_size=batch_size, train_sampling_strategy=strategy
        )
    )
    model = case.model("sdpa" if padded else PACKED)
    return Halted(
        Trainer(model=model, args=args, train_dataset=case.data, data_collator=collate), collate
    )


def planned(case: Case, ranks: int) -> "Halted":
    """hf_distca with its defaults, documents in the order of the data, which fill each step.

    An epoch has all steps: the process that loads ahead, which is a default, starts once an epoch.
    """
    args = DistCATrainingArguments(
        **case.arguments(num_train_epochs=1, use_cpu=True, train_sampling_strategy="sequential"),
        tokens_per_rank=-(-sum(case.lengths) // ranks),
    )
    return Halted(
        DistCATrainer(
            model=case.model("distca"), args=args, train_dataset=case.data * (case.steps + 1)
        )
    )


def first_row(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: column[0] for name, column in batch.items()}


def ulysses(case: Case, ranks: int, attention: str = PACKED, in_two_rows: bool = False) -> "Halted":
    """Ulysses sequence parallelism of DeepSpeed through accelerate, ZeRO off, rows of packed
    documents.

    All ranks share every row. A rank has an equal part of the row's tokens; in attention it has all
    tokens and an equal part of the heads. There are as many rows as ranks, and they are computed
    one after another. With two rows, the first document of a step is alone in one row. gloo needs
    rows of equal length.
    """
    # As accelerate's launcher sets them: with TrainingArguments' `deepspeed` transformers leaves
    # `ddp_backend` out, without which accelerate has no backend for CPUs, takes every process for
    # the only one, and gives all of them the same documents.
    os.environ.update(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_ZERO_STAGE="0")
    flatten = DataCollatorWithFlattening()
    data = case.data
    parts = [data[:1], data[1:]] if in_two_rows else [data]
    packed = [first_row(flatten(part)) for part in parts]
    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
    handler.sp_attn_implementation = (
        attention  # accelerate takes few names, DeepSpeed any that is registered
    )
    args = TrainingArguments(
        **case.arguments(
            num_train_epochs=1,
            ddp_backend="gloo",
            train_sampling_strategy="sequential",
            per_device_train_batch_size=1,
            gradient_accumulation_steps=len(parts),
            parallelism_config=ParallelismConfig(
                sp_size=ranks, sp_backend="deepspeed", sp_handler=handler
            ),
        )
    )
    rows = packed * (-(-case.steps // ranks) * ranks)
    model = case.model(attention)
    return Halted(
        Trainer(model=model, args=args, train_dataset=rows, data_collator=default_data_collator)
    )


OURS, ULYSSES = "hf_distca", "Ulysses"
DATA_PARALLEL: Makers = {
    "flattened": data_parallel,
    "rebalanced": partial(data_parallel, strategy="batch_rebalance"),
    "rebalanced, padded": partial(data_parallel, strategy="batch_rebalance", padded=True),
    OURS: planned,
}
"""Strategies that share processes."""


class Halted(TrainerCallback):
    """A trainer that trains in a thread of its own, one optimizer step at a time.

    Args:
        counted: its collator; None where the trainer logs the imbalance, or it is known.
    """

    def __init__(self, trainer: Trainer, counted: Counted | None = None) -> None:
        self._trainer = trainer
        self._counted = counted
        self._go: queue.Queue[None] = queue.Queue()
        self._logged: queue.Queue[dict[str, float] | BaseException] = queue.Queue()
        trainer.add_callback(self)
        trainer.remove_callback(PrinterCallback)
        self._thread = threading.Thread(target=self._train, daemon=True)

    def _train(self) -> None:
        torch.set_num_threads(1)  # a number of the thread, not of the process
        try:
            self._trainer.train()
        except BaseException as error:
            self._logged.put(error)

    def on_train_begin(self, *_args: Any, **_kwargs: Any) -> None:
        self._go.get()

    def on_log(
        self, _args: Any, _state: Any, _control: Any, logs: dict[str, float], **_: Any
    ) -> None:
        """Pass a step's log on, and wait for the next step."""
        if "loss" in logs:
            self._logged.put(dict(logs))
            self._go.get()

    def step(self) -> dict[str, Any]:
        """Figures of a step on this rank, from documents to updated weights on all ranks."""
        if (
            self._thread.ident is None
        ):  # not earlier: arguments of a further trainer reset what accelerate knows
            self._thread.start()
        dist.barrier()
        begin = time.perf_counter()
        self._go.put(None)
        log = self._logged.get()
        if isinstance(log, BaseException):
            raise log
        dist.barrier()
        found: dict[str, Any] = {"seconds": time.perf_counter() - begin, "loss": log["loss"]}
        if self._counted is not None:
            found["pairs"] = float(self._counted.pairs)
            self._counted.pairs = 0
        if "distca/imbalance_degree" in log:
            found["imbalance"] = log["distca/imbalance_degree"]
        return found

    def step_memory(self) -> dict[str, Any]:
        """MiB that the process holds at most in a step above what it holds before."""
        follow_tensors()
        before = begin_peak()
        self.step()
        return {"MiB": (peak() - before) / 2**20}


def enter(rank: int) -> None:
    os.environ["LOCAL_RANK"] = str(rank)


def prepare(makers: Makers, cases: dict[str, Case], ranks: int) -> Callable[[], Figures]:
    """Make the trainers of this rank, and a round: every strategy once, in shuffled order, the same
    on all ranks.

    The last of the steps that a case has is taken for its memory.
    """
    trainers = {
        f"{mix}, {strategy}": make(case, ranks)
        for mix, case in cases.items()
        for strategy, make in makers.items()
    }
    order = random.Random(0)
    steps = next(iter(cases.values())).steps
    left = iter(range(steps))

    def take() -> Figures:
        measures_memory = next(left) == steps - 1
        names = order.sample(list(trainers), len(trainers))
        return {
            name: trainers[name].step_memory() if measures_memory else trainers[name].step()
            for name in names
        }

    return take


def together(of_ranks: Sequence[Figures]) -> Figures:
    found: Figures = {}
    for name, first in of_ranks[0].items():
        each = [rank[name] for rank in of_ranks]
        found[name] = {key: value for key, value in first.items() if key != "pairs"}
        if "pairs" in first:  # of the busiest rank over the mean
            computed = [rank["pairs"] for rank in each]
            found[name]["imbalance"] = max(computed) * len(computed) / sum(computed)
        if "MiB" in first:
            found[name]["MiB"] = max(rank["MiB"] for rank in each)
    return found


def largest_difference(losses: Sequence[float], others: Sequence[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(losses, others, strict=True))


def measure(
    ranks: int,
    rounds: int,
    lengths: dict[str, list[int]],
    folder: str,
    processes: Sequence[tuple[Makers, Sequence[str]]],
) -> list[Figures]:
    """Figures of every step of every strategy: one to warm up, the rounds, and one for memory.

    Args:
        processes: strategies and mixes that share a process on each rank.
    """
    cases = {mix: Case(of_mix, rounds + 2, folder) for mix, of_mix in lengths.items()}
    order = random.Random(0)
    with ExitStack() as stack:
        pools = [
            stack.enter_context(
                Ranks(
                    ranks, prepare, makers, {mix: cases[mix] for mix in mixes}, ranks, enter=enter
                )
            )
            for makers, mixes in processes
        ]
        steps = []
        for _ in range(rounds + 2):
            of_step: Figures = {}
            for pool in order.sample(pools, len(pools)):
                of_step |= together(pool.take())
            steps.append(of_step)
            print(".", end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)
    return steps


class Comparison:
    """What is reported of the steps of all strategies.

    Args:
        lengths: of the documents of each mix.
    """

    def __init__(self, rounds: int, lengths: dict[str, list[int]]) -> None:
        self._lengths = lengths
        self._rounds: list[dict[str, float]] = [{} for _ in range(rounds)]
        self._strategies: dict[str, dict[str, Any]] = {}
        self._ratios: dict[str, Callable[[Round], float]] = {}

    def add(self, ranks: int, names: Sequence[str], steps: Sequence[Figures]) -> None:
        """Add the steps that so many ranks took with the strategies of these names."""
        for mix, lengths in self._lengths.items():
            setting = f"{ranks} ranks, {mix}"
            ours = [each[f"{mix}, {OURS}"]["loss"] for each in steps[:-1]]
            for strategy in names:
                of_strategy = [each[f"{mix}, {strategy}"] for each in steps]
                losses = [each["loss"] for each in of_strategy[:-1]]
                self._strategies[f"{setting}, {strategy}"] = {
                    "first_loss": f"{losses[0]:.7f}",
                    "largest_difference_of_losses": largest_difference(losses, ours),
                    "MiB": of_strategy[-1]["MiB"],
                }
                for taken, timed in zip(self._rounds, of_strategy[1:-1], strict=True):
                    taken[f"{setting}, {strategy}, tokens/s"] = sum(lengths) / timed["seconds"]
                    taken[f"{setting}, {strategy}, imbalance"] = timed.get("imbalance", 1.0)
                if strategy != OURS:
                    speeds = (f"{setting}, {each}, tokens/s" for each in (OURS, strategy))
                    self._ratios[f"{setting}: {OURS} / {strategy}"] = over(*speeds)

    def report(self, **others: object) -> None:
        """Print what was added, and `others`."""
        taken: list[Round] = list(self._rounds)
        report(
            Measured(taken),
            self._ratios,
            lengths=self._lengths,
            strategies=self._strategies,
            **others,
        )


def processes_of_ulysses(mixes: Iterable[str]) -> list[tuple[Makers, tuple[str, ...]]]:
    """Ulysses replaces attention in the whole process, so each training has its own."""
    return [({ULYSSES: ulysses}, (mix,)) for mix in mixes]


def first_loss(case: Case, **settings: Any) -> float:
    """Loss of the first step by Ulysses on two ranks with other settings."""
    makers = {ULYSSES: partial(ulysses, **settings)}
    with Ranks(2, prepare, makers, {"packed": case}, 2, enter=enter) as ranks:
        loss: float = together(ranks.take())[f"packed, {ULYSSES}"]["loss"]
    return loss


def scaled(lengths: Sequence[int], tokens: int) -> list[int]:
    """Lengths of a mix for a step of so many tokens."""
    return [length * tokens // TOKENS for length in lengths]


def main() -> None:
    options = options_parser(
        __doc__, rounds=(6, "how many"), tokens=(TOKENS, "of a step")
    ).parse_args()
    lengths = {mix: scaled(of_mix, options.tokens) for mix, of_mix in MIXES.items()}
    comparison = Comparison(options.rounds, lengths)
    processes = [(DATA_PARALLEL, tuple(lengths)), *processes_of_ulysses(lengths)]
    with tempfile.TemporaryDirectory() as folder:
        case = Case(lengths["one long"], 2, folder)
        masks_dropped = first_loss(case, attention="sdpa")
        two_rows = first_loss(case, in_two_rows=True)
        for ranks in RANKS:
            steps = measure(ranks, options.rounds, lengths, folder, processes)
            comparison.add(ranks, (*DATA_PARALLEL, ULYSSES), steps)
    comparison.report(
        ulysses_sdpa_first_loss=f"{masks_dropped:.7f}",
        ulysses_two_rows_first_loss=f"{two_rows:.7f}",
    )


if __name__ == "__main__":
    main()
