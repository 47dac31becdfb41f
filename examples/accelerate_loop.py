"""The pieces apart: a training loop of one's own, with a collator that knows nothing of hf_distca.

    accelerate launch --num_processes 8 --mixed_precision bf16 examples/accelerate_loop.py \
        --model_name_or_path meta-llama/Llama-3.2-1B

Five lines are new, each marked "distca". Documents stay on the rank where accelerate's data loader
puts them; only their core attention moves. Where the whole micro-batch may be laid out anew, as
DistCATrainer does, the same balance takes fewer bytes.
"""

import argparse
import sysconfig
from contextlib import suppress
from pathlib import Path

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorWithFlattening

import hf_distca


@hf_distca.record  # an error is reported once, and not by every process
def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--model_name_or_path", required=True, help="checkpoint: a name on the Hub or a folder"
    )
    parser.add_argument(
        "--documents_per_rank", type=int, default=4, help="documents of a rank in one step"
    )
    parser.add_argument("--max_length", type=int, default=4096, help="tokens kept of a document")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    options = parser.parse_args()

    accelerator = Accelerator()
    torch.manual_seed(0)  # the loader's order; every rank draws the same one and takes its share
    tokenizer = AutoTokenizer.from_pretrained(options.model_name_or_path)
    needed = options.steps * options.documents_per_rank * accelerator.num_processes
    texts = standard_library(progress=accelerator.is_main_process).shuffle(seed=0)
    documents = texts.select(range(min(needed, len(texts)))).map(
        lambda batch: tokenizer(
            [text + tokenizer.eos_token for text in batch["text"]],
            truncation=True,
            max_length=options.max_length,
        ),
        batched=True,
        desc="Tokenizing",
    )
    loader = DataLoader(
        documents.select_columns(["input_ids"]),
        batch_size=options.documents_per_rank,
        shuffle=True,
        # distca: lengths are read here and not from a batch on a GPU, which would have to be waited
        # for
        collate_fn=hf_distca.CollatorWithLengths(DataCollatorWithFlattening()),
    )

    model = AutoModelForCausalLM.from_pretrained(
        options.model_name_or_path,
        attn_implementation="distca",  # distca
        use_cache=False,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    config = hf_distca.DistCAConfig(
        tokens_per_rank=options.documents_per_rank * options.max_length
    )  # distca
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
    # distca: rows travel between the ranks, and decoder layers run both nano-batches in turns
    dispatcher = hf_distca.make_dispatcher(model, config, accelerator.device, dtype=dtype)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    model.train()
    for step, batch in enumerate(loader, 1):
        # Ranks hold different numbers of targets: each divides its sum by the targets of all. Their
        # gradients are averaged, which the factor in backward() makes up for.
        targets = accelerator.reduce((batch["labels"][:, 1:] != -100).sum(), "sum")
        batch = dispatcher.plan_batch(batch)  # distca
        loss = model(**batch, num_items_in_batch=targets).loss
        accelerator.backward(loss * accelerator.num_processes)
        optimizer.step()
        optimizer.zero_grad()
        summary = batch["distca_plan"].plan.summary
        accelerator.print(
            f"step {step}  loss {accelerator.reduce(loss.detach(), 'sum').item():.3f}  "
            f"pairs max/mean {summary.packed_max_over_mean:.2f} -> {summary.max_over_mean:.2f}"
        )
    accelerator.wait_for_everyone()
    accelerator.end_training()


def standard_library(progress: bool = True) -> Dataset:
    """Return the sources of the Python standard library, one document per file.

    Files of 100 bytes to 300 kB: a few are hundreds of times as long as most, as in long-context
    data. Installed packages are left out, and files that are not UTF-8, which the standard library
    tests its parser with.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for path in tqdm(
        sorted(root.rglob("*.py")),
        "Reading the standard library",
        unit=" files",
        disable=not progress,
    ):
        installed = {"site-packages", "dist-packages"} & set(path.relative_to(root).parts)
        if not installed and 100 <= path.stat().st_size <= 300_000:
            with suppress(UnicodeDecodeError):
                texts.append(path.read_text(encoding="utf-8"))
    if not texts:
        raise FileNotFoundError(
            f"found no .py files under {root}, where the standard library should be"
        )
    return Dataset.from_dict({"text": texts})


if __name__ == "__main__":
    main()
