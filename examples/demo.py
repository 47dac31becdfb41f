"""Train the same documents with plain DDP and with hf_distca, on CPU processes, and compare the two.

    python examples/make_checkpoint.py --output runs/checkpoint --hidden_size 128 --vocab_size 2048
    accelerate launch --config_file examples/configs/ddp.yaml examples/demo.py --model_name_or_path runs/checkpoint

Documents are source files of the Python standard library. Both trainings see the same documents in the same steps.
Plain DDP packs whole documents in order, without padding, and computes attention within each document alone.
"""

import argparse
import sysconfig
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import mean, median
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
    parser.add_argument("--tokens_per_rank", type=int, default=4096, help="tokens of a rank in a step (default: 4096)")
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
    say(args, f"Training {options.steps} steps with plain DDP ...")
    packed = [{"documents": part} for step in steps for part in packed_in_order(step, ranks)]
    plain = train(Trainer, load(options, PACKED), plain_args, packed, data_collator=flatten)
    say(args, f"Training the same {options.steps} steps with hf_distca ...")
    documents = [{"input_ids": document} for step in steps for document in step]
    planned = train(hf_distca.DistCATrainer, load(options, "distca"), args, documents)

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


@dataclass
class Measured:
    """What a training came to.

    Attributes:
        losses: of each step.
        seconds: of each step.
        busy: [steps][ranks] seconds of processor time.
        imbalance: query-key pairs of the busiest rank over the mean.
    """

    losses: list[float]
    seconds: list[float]
    busy: list[list[float]]
    imbalance: float = field(default=0.0)

    @property
    def idle(self) -> float:
        """Share of all ranks' time in which they did not compute."""
        return 1 - sum(map(mean, self.busy)) / sum(self.seconds)


class Clock(transformers.TrainerCallback):
    """Notes wall-clock and processor time at the end of every step."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        """Note both times."""
        self.times.append((time.perf_counter(), time.process_time()))


def load(options: argparse.Namespace, attention: str) -> torch.nn.Module:
    """Load the checkpoint in float32."""
    return AutoModelForCausalLM.from_pretrained(
        options.model_name_or_path, attn_implementation=attention, dtype=torch.float32
    )


def train(trainer_class: type[Trainer], model: torch.nn.Module, args: Any, data: Any, **options: Any) -> Measured:
    """Train, and return what all ranks measured."""
    trainer = trainer_class(model=model, args=args, train_dataset=data, **options)
    trainer.remove_callback(transformers.PrinterCallback)
    clock = Clock()
    trainer.add_callback(clock)
    trainer.train()
    times = gather_object([clock.times])
    steps = range(WARM_UP, len(clock.times))
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Measured(
        losses=[entry["loss"] for entry in log],
        seconds=[clock.times[step][0] - clock.times[step - 1][0] for step in steps],
        busy=[[rank[step][1] - rank[step - 1][1] for rank in times] for step in steps],
        imbalance=mean(entry.get("distca/imbalance_degree", 0.0) for entry in log[WARM_UP:]),
    )


# ---- the comparison


def print_table(found: dict[str, Measured]) -> None:
    """Print both trainings side by side, and one step of each as bars."""
    plain, planned = found.values()
    gains = [before / after for before, after in zip(plain.seconds, planned.seconds, strict=True)]
    rows = [
        ("step time, mean", [f"{mean(each.seconds):.2f} s" for each in found.values()]),
        ("idle share", [f"{each.idle:.0%}" for each in found.values()]),
        ("imbalance of attention", [f"{each.imbalance:.2f}" for each in found.values()]),
        ("loss, first step", [f"{each.losses[0]:.4f}" for each in found.values()]),
        ("loss, last step", [f"{each.losses[-1]:.4f}" for each in found.values()]),
    ]
    print(f"\n{'':<24}" + "".join(f"{name:>12}" for name in found))
    for name, values in rows:
        print(f"{name:<24}" + "".join(f"{value:>12}" for value in values))
    apart = max(abs(a - b) for a, b in zip(plain.losses, planned.losses, strict=True))
    print(f"\nSpeed-up {sum(plain.seconds) / sum(planned.seconds):.2f}×; losses differ by {apart:.0e} at most.")

    step = gains.index(sorted(gains)[len(gains) // 2])
    print(f"\nStep {step + WARM_UP + 1}, whose speed-up is the median ({gains[step]:.2f}×): █ computes, · waits")
    scale = BAR / max(plain.seconds[step], planned.seconds[step])
    for name, each in found.items():
        for rank, busy in enumerate(each.busy[step]):
            computes = min(round(busy * scale), whole := round(each.seconds[step] * scale))
            print(f"  {name:<10} rank {rank}  {'█' * computes}{'·' * (whole - computes)}")
    print(
        "\nIdle share: time in which a process does not compute, over all time. Imbalance: query-key pairs of the "
        "busiest\nrank over the mean. Both hold for steps after the first two."
    )


if __name__ == "__main__":
    main()
