"""Train the same documents with plain DDP and with hf_distca, on CPU processes, and compare the two.

    python examples/make_checkpoint.py --output runs/checkpoint --hidden_size 128 --layers 2 --vocab_size 2048
    accelerate launch --config_file examples/configs/ddp.yaml examples/demo.py --model_name_or_path runs/checkpoint

Documents are source files of the Python standard library. Both trainings see the same documents in the same steps.
Plain DDP packs whole documents in order, without padding, and computes attention within each document alone.
"""

import argparse
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean, median, quantiles
from threading import Semaphore
from typing import Any

import datasets
import torch
import transformers
from accelerate.utils import gather_object
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorWithFlattening, Trainer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import hf_distca

WARM_UP = 2
"""Steps at the start that no figure counts: the first allocates memory, the second lets DDP form its buckets."""
BAR = 48
"""Characters of the longest bar."""
Documents = list[list[int]]
"""Token ids of each document."""


def main() -> None:
    """Read the options, train twice, print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", required=True, help="checkpoint: a name on the Hub or a folder")
    parser.add_argument("--output_dir", default="runs/demo", help="folder for the traces (default: runs/demo)")
    parser.add_argument("--tokens_per_rank", type=int, default=8192, help="tokens of a rank in a step (default: 8192)")
    parser.add_argument("--steps", type=int, default=20, help="steps of each training (default: 20)")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()

    settings = {
        "output_dir": options.output_dir,
        "max_steps": options.steps,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "ddp_find_unused_parameters": False,
        "dataloader_pin_memory": False,
    }
    # Arguments first: they connect the processes.
    args = hf_distca.DistCATrainingArguments(tokens_per_rank=options.tokens_per_rank, trace_steps=3, **settings)
    ranks = args.world_size
    steps = full_steps(read_documents(options, ranks), ranks * options.tokens_per_rank, options.steps)
    lengths = [len(document) for step in steps for document in step]
    say(args, f"{len(lengths)} documents of {min(lengths)} to {max(lengths)} tokens, the median {median(lengths):.0f}")

    plain_args = transformers.TrainingArguments(**settings, per_device_train_batch_size=1, remove_unused_columns=False)
    packed = [{"documents": part} for step in steps for part in packed_in_order(step, ranks)]
    documents = [{"input_ids": document} for step in steps for document in step]
    say(args, f"Training {options.steps} steps with plain DDP and with hf_distca, in turns ...")
    plain, planned = train_in_turns(
        [
            Trainer(model=load(options, PACKED), args=plain_args, train_dataset=packed, data_collator=flatten),
            hf_distca.DistCATrainer(model=load(options, "distca"), args=args, train_dataset=documents),
        ]
    )

    if args.process_index == 0:
        plain.imbalance = mean(imbalance(packed_in_order(step, ranks)) for step in steps[WARM_UP:])
        print_table({"plain DDP": plain, "hf_distca": planned})
    gather_object([None])  # every process waits for rank 0
    torch.distributed.destroy_process_group()


def say(args: transformers.TrainingArguments, line: str) -> None:
    """Print a line on rank 0."""
    if args.process_index == 0:
        print(line, flush=True)


# ---- the documents, and who trains on which


def read_documents(options: argparse.Namespace, ranks: int) -> Documents:
    """Source files of the standard library as tokens, in random order; those that fit on one rank.

    Plain packing can train on longer ones only in pieces.
    """
    tokenizer = AutoTokenizer.from_pretrained(options.model_name_or_path)
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in root.rglob("*.py") if "-packages" not in str(path.relative_to(root)))
    Random(0).shuffle(paths)
    documents: Documents = []
    left = (
        options.steps * options.tokens_per_rank * ranks * 3 // 2
    )  # some tokens more than all steps take, which cut some
    for path in paths:
        with suppress(UnicodeDecodeError):
            tokens = tokenizer(path.read_text(encoding="utf-8"), verbose=False)["input_ids"]
            if 32 <= len(tokens) <= options.tokens_per_rank:
                documents.append(tokens)
                left -= len(tokens)
        if left < 0:
            break
    return documents


def full_steps(documents: Documents, capacity: int, count: int) -> list[Documents]:
    """Return the documents of each step, in order: `capacity` tokens, the last document cut short to fill them."""
    steps: list[Documents] = []
    of_step: Documents = []
    for document in documents:
        of_step.append(document[: capacity - sum(map(len, of_step))])
        if sum(map(len, of_step)) == capacity:
            steps.append(of_step)
            of_step = []
    return steps[:count]


def packed_in_order(step: Documents, ranks: int) -> list[Documents]:
    """Return the documents of each rank: whole and in order, with tokens as equal as that allows."""
    parts: list[Documents] = [[] for _ in range(ranks)]
    total, before = sum(map(len, step)), 0
    for document in step:
        parts[int((before + len(document) / 2) / total * ranks)].append(document)
        before += len(document)
    return parts


def imbalance(parts: list[Documents]) -> float:
    """Query-key pairs of the busiest rank over the mean."""
    pairs = [sum(len(document) * (len(document) + 1) / 2 for document in part) for part in parts]
    return max(pairs) / mean(pairs)


# ---- plain training


def attend_within_documents(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Any,
    *,
    position_ids: Tensor,
    **more: Any,
) -> tuple[Tensor, None]:
    """Compute attention document by document, as FlashAttention does for packed rows on GPUs."""
    starts = torch.nonzero(position_ids[0] == 0).flatten().tolist()
    outputs = []
    for start, stop in zip(starts, [*starts[1:], query.shape[2]], strict=True):
        rows = (x[:, :, start:stop] for x in (query, key, value))
        outputs.append(sdpa_attention_forward(module, *rows, None, scaling=more["scaling"], is_causal=True)[0])
    return torch.cat(outputs, dim=1), None


PACKED = "within_documents"
transformers.AttentionInterface.register(PACKED, attend_within_documents)


def flatten(examples: list[dict[str, Documents]]) -> dict[str, Tensor]:
    """Put a rank's documents into one row without padding."""
    (example,) = examples
    return DataCollatorWithFlattening()([{"input_ids": document} for document in example["documents"]])


# ---- training and measuring


class Turns(transformers.TrainerCallback):
    """Lets two trainings take turns, a step each, so that whatever else the machine does slows both alike.

    Args:
        mine: released when this training may take a step.
        others: the same of the other training.
    """

    def __init__(self, mine: Semaphore, others: Semaphore) -> None:
        self._mine, self._others = mine, others
        self.seconds: list[float] = []
        self.busy: list[float] = []

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        """Note what the step took, and wait for the next turn."""
        self.seconds.append(time.perf_counter() - self._began[0])
        self.busy.append(busy_seconds() - self._began[1])
        self._others.release()
        self._take_turn()

    def train(self, trainer: Trainer) -> None:
        """Train: a step in each turn, what comes before the first with it, and what comes after the last in one more.

        So collectives of the two trainings never mix.
        """
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.add_callback(self)
        self._take_turn()
        try:
            trainer.train()
        finally:
            self._others.release()

    def _take_turn(self) -> None:
        self._mine.acquire()
        self._began = time.perf_counter(), busy_seconds()


def busy_seconds() -> float:
    """Return how long this thread has computed, or waited for a core that another program had."""
    try:
        on_a_core, for_a_core, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except OSError:  # a kernel that does not count it
        return time.thread_time()
    return (int(on_a_core) + int(for_a_core)) / 1e9


@dataclass
class Measured:
    """What a training came to.

    Attributes:
        losses: of each step.
        seconds: of each step after the first ones.
        busy: [steps][ranks] seconds of each of these steps in which a rank did not wait for another.
        imbalance: query-key pairs of the busiest rank over the mean.
    """

    losses: list[float]
    seconds: list[float]
    busy: list[list[float]]
    imbalance: float

    @classmethod
    def of(cls, trainer: Trainer, turns: Turns) -> "Measured":
        """Gather it from all ranks."""
        log = [entry for entry in trainer.state.log_history if "loss" in entry]
        return cls(
            losses=[entry["loss"] for entry in log],
            seconds=turns.seconds[WARM_UP:],
            busy=[list(ranks) for ranks in zip(*gather_object([turns.busy[WARM_UP:]]), strict=True)],
            imbalance=mean(entry.get("distca/imbalance_degree", 0.0) for entry in log[WARM_UP:]),
        )

    @property
    def idle(self) -> float:
        """Share of all ranks' time in which they waited for one another."""
        return max(0.0, 1 - sum(map(mean, self.busy)) / sum(self.seconds))


def load(options: argparse.Namespace, attention: str) -> torch.nn.Module:
    """Load the checkpoint in float32."""
    return AutoModelForCausalLM.from_pretrained(
        options.model_name_or_path, attn_implementation=attention, dtype=torch.float32
    )


def train_in_turns(trainers: list[Trainer]) -> list[Measured]:
    """Train with both, a step of one after a step of the other, and return what all ranks measured."""
    may_step = [Semaphore(1), Semaphore(0)]
    turns = [Turns(*may_step), Turns(*reversed(may_step))]
    with ThreadPoolExecutor(len(trainers)) as pool:
        for training in [pool.submit(turn.train, trainer) for trainer, turn in zip(trainers, turns, strict=True)]:
            training.result()
    return [Measured.of(trainer, turn) for trainer, turn in zip(trainers, turns, strict=True)]


# ---- the comparison


def print_table(found: dict[str, Measured]) -> None:
    """Print both trainings side by side, and one step of each as bars."""
    plain, planned = found.values()
    gains = [before / after for before, after in zip(plain.seconds, planned.seconds, strict=True)]
    rows = [
        ("step time, median", [f"{median(each.seconds):.2f} s" for each in found.values()]),
        ("idle share", [f"{each.idle:.0%}" for each in found.values()]),
        ("imbalance of attention", [f"{each.imbalance:.2f}" for each in found.values()]),
        ("loss, first step", [f"{each.losses[0]:.4f}" for each in found.values()]),
        ("loss, last step", [f"{each.losses[-1]:.4f}" for each in found.values()]),
    ]
    print(f"\n{'':<24}" + "".join(f"{name:>12}" for name in found))
    for name, values in rows:
        print(f"{name:<24}" + "".join(f"{value:>12}" for value in values))
    apart = max(abs(a - b) for a, b in zip(plain.losses, planned.losses, strict=True))
    lower, middle, upper = quantiles(gains, n=4)
    print(f"\nSpeed-up {middle:.2f}× (quartiles {lower:.2f} to {upper:.2f}); losses differ by {apart:.0e} at most.")

    step = gains.index(sorted(gains)[len(gains) // 2])
    print(f"\nStep {step + WARM_UP + 1}, whose speed-up is {gains[step]:.2f}×: █ computes, · waits")
    scale = BAR / max(plain.seconds[step], planned.seconds[step])
    for name, each in found.items():
        for rank, busy in enumerate(each.busy[step]):
            computes = min(round(busy * scale), whole := round(each.seconds[step] * scale))
            print(f"  {name:<10} rank {rank}  {'█' * computes}{'·' * (whole - computes)}")
    print(
        "\nIdle share: time in which a rank waits for the others, over all time. Imbalance: query-key pairs of the "
        "busiest\nrank over the mean. Steps after the first two."
    )


if __name__ == "__main__":
    main()
