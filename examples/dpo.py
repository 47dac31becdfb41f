"""Train a model on preferences, pairs of a chosen and a rejected answer, with TRL's DPO.

Padded batches are packed.

    accelerate launch --config_file examples/configs/fsdp2.yaml --num_processes 8 examples/dpo.py \
        --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/ultrafeedback_binarized \
        --use_peft --output_dir runs/dpo --tokens_per_rank 16k \
        --per_device_train_batch_size 8 --learning_rate 1e-5

Without --dataset_name the pairs are functions of the Python standard library: the body that belongs
to a docstring is chosen, that of another function rejected. Every option of trl.DPOConfig and of
hf_distca.DistCAConfig is one here too; --help lists them.
"""

import ast
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import HfArgumentParser

import hf_distca

if TYPE_CHECKING:
    from peft import LoraConfig


@dataclass
class ScriptArguments:
    """What to train, on what."""

    model_name_or_path: str = field(metadata={"help": "Checkpoint: a name on the Hub or a folder."})
    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": (
                "Pairs: a .jsonl or .parquet file with a pair a row, a folder of such files, or a"
                " name on the Hub. Columns as TRL takes them: prompt, chosen, rejected. Without"
                " it, functions of the standard library."
            )
        },
    )
    max_pairs: int | None = field(
        default=None, metadata={"help": "Take so many pairs, drawn by the seed; all without it."}
    )
    use_peft: bool = field(
        default=False, metadata={"help": "Train adapters of rank 16 on all linear layers only."}
    )


@hf_distca.record  # an error is reported once, and not by every process
def main() -> None:
    """Read the options, prepare pairs, train, save."""
    parser = HfArgumentParser(
        (ScriptArguments, hf_distca.DistCADPOConfig), usage="%(prog)s [OPTIONS]"
    )
    parser.set_defaults(
        output_dir="runs/dpo",
        # The tokens of a rank's batch: chosen and rejected answers, without padding.
        tokens_per_rank=4096,
        bf16=torch.cuda.is_available(),
        logging_steps=5,
        logging_first_step=True,
    )
    script_args, training_args, unknown = parser.parse_args_into_dataclasses(
        return_remaining_strings=True
    )
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; --help lists all")
    training_args.serve_if_server()
    adapters = lora_adapters(parser) if script_args.use_peft else None

    with training_args.main_process_first(desc="loading"):
        pairs = load_pairs(
            script_args, training_args.seed, show_progress=training_args.process_index == 0
        )

    trainer = hf_distca.DistCADPOTrainer(
        model=script_args.model_name_or_path,  # gets planned attention
        args=training_args,
        train_dataset=pairs,
        peft_config=adapters,
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()

    if trainer.is_world_process_zero():
        print_summary(trainer.state.log_history, training_args.output_dir)
    # A gloo thread that still lets go of its last tensors would abort the process on its way out,
    # or never end.
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


def print_summary(log_history: list[dict[str, float]], folder: str | None) -> None:
    """Print the loss, the share of padding and the folder of the model.

    Without logged steps only the folder.
    """
    steps = [entry for entry in log_history if "loss" in entry and "distca/padding_share" in entry]
    if steps:
        padding = sum(step["distca/padding_share"] for step in steps) / len(steps)
        print(f"\nThe loss: {steps[0]['loss']:.3f} at first, {steps[-1]['loss']:.3f} at last")
        print(f"Padding: {padding:.0%} of the batches, which was not computed")
    print(f"The model: {folder}")


def lora_adapters(parser: HfArgumentParser) -> "LoraConfig":
    """Adapters of rank 16 on all linear layers; the option is refused where peft is missing."""
    try:
        from peft import LoraConfig
    except ModuleNotFoundError as error:
        parser.error(f"--use_peft needs peft, which cannot be imported ({error}): pip install peft")
    return LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")


def load_pairs(script_args: ScriptArguments, seed: int, show_progress: bool) -> Dataset:
    """Load the pairs, as TRL takes them, in random order."""
    if script_args.dataset_name is None:
        sources = standard_library(progress=show_progress).shuffle(seed=seed)["text"]
        return Dataset.from_list(list(islice(function_pairs(sources), script_args.max_pairs)))
    pairs = hf_distca.load_documents(script_args.dataset_name)
    count = len(pairs) if script_args.max_pairs is None else min(script_args.max_pairs, len(pairs))
    return pairs.shuffle(seed=seed).select(range(count))


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


def function_pairs(sources: Iterable[str]) -> Iterator[dict[str, str]]:
    """Make a pair of each documented function.

    Its own body is chosen, and the body of the next function in its file is rejected.

    Args:
        sources: texts of Python modules. Those that are not valid Python have no pairs.
    """
    for source in sources:
        try:
            nodes = list(ast.walk(ast.parse(source)))
        except (SyntaxError, ValueError):  # what the parser's own tests are made of
            continue
        functions = [
            node for node in nodes if isinstance(node, ast.FunctionDef) and len(node.body) > 1
        ]
        documented = [function for function in functions if ast.get_docstring(function) is not None]
        for function, another in pairwise(documented):
            head = ast.FunctionDef(
                **{**vars(function), "decorator_list": [], "body": function.body[:1]}
            )
            yield {
                "prompt": ast.unparse(head) + "\n",
                "chosen": body_of(function),
                "rejected": body_of(another),
            }


def body_of(function: ast.FunctionDef) -> str:
    """Return the text of a function's body without the docstring."""
    return textwrap.indent("\n".join(map(ast.unparse, function.body[1:])), "    ")


if __name__ == "__main__":
    main()
