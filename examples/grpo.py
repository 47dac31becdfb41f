"""Train a model by rewards that a program computes, with TRL's GRPO.

Padded batches are packed and balanced.

    accelerate launch --config_file examples/configs/fsdp2.yaml --num_processes 8 examples/grpo.py \
        --model_name_or_path Qwen/Qwen3-0.6B --use_peft --output_dir runs/grpo \
        --tokens_per_rank 16k --per_device_train_batch_size 8 --max_completion_length 512 \
        --learning_rate 1e-5

Without --dataset_name the prompts are heads of functions of the Python standard library, with their
docstrings. The model writes on, and Python's parser rewards what it can read. Every option of
trl.GRPOConfig and of hf_distca.DistCAConfig is one here too; --help lists them.
"""

import ast
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
                "Prompts: a .jsonl or .parquet file with a prompt a row, a folder of such files,"
                " or a name on the Hub. The column prompt has text or messages. Without it,"
                " functions of the standard library."
            )
        },
    )
    max_prompts: int | None = field(
        default=None, metadata={"help": "Take so many prompts, drawn by the seed; all without it."}
    )
    use_peft: bool = field(
        default=False, metadata={"help": "Train adapters of rank 16 on all linear layers only."}
    )


def reward(prompts: list[Any], completions: list[Any], **_columns: Any) -> list[float]:
    """Return the share of each completion that Python's parser reads before its first error.

    Args:
        prompts, completions: [rows] texts, or lists of messages where prompts are messages.
        _columns: other columns of the data set, such as a solution to compare with.
    """
    return [
        readable_share(text_of(prompt), text_of(completion))
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


@hf_distca.record  # an error is reported once, and not by every process
def main() -> None:
    """Read the options, prepare prompts, train, save."""
    parser = HfArgumentParser(
        (ScriptArguments, hf_distca.DistCAGRPOConfig), usage="%(prog)s [OPTIONS]"
    )
    parser.set_defaults(
        output_dir="runs/grpo",
        # The tokens of a rank's batch: prompts and completions, without padding.
        tokens_per_rank=4096,
        bf16=torch.cuda.is_available(),
        max_completion_length=64,
        logging_steps=1,
    )
    script_args, training_args, unknown = parser.parse_args_into_dataclasses(
        return_remaining_strings=True
    )
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; --help lists all")
    training_args.serve_if_server()
    warnings.simplefilter(
        "ignore", SyntaxWarning
    )  # of odd escapes and comparisons in what the reward parses
    adapters = lora_adapters(parser) if script_args.use_peft else None

    with training_args.main_process_first(desc="loading"):
        prompts = load_prompts(
            script_args, training_args.seed, show_progress=training_args.process_index == 0
        )

    trainer = hf_distca.DistCAGRPOTrainer(
        model=script_args.model_name_or_path,  # gets planned attention
        reward_funcs=reward,
        args=training_args,
        train_dataset=prompts,
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
    """Print the reward, the share of padding and the folder of the model.

    Without logged steps only the folder.
    """
    steps = [
        entry for entry in log_history if "reward" in entry and "distca/padding_share" in entry
    ]
    if steps:
        padding = sum(step["distca/padding_share"] for step in steps) / len(steps)
        print(f"\nThe reward: {steps[0]['reward']:.3f} at first, {steps[-1]['reward']:.3f} at last")
        print(f"Padding: {padding:.0%} of the batches, which was not computed")
    print(f"The model: {folder}")


def readable_share(prompt: str, completion: str) -> float:
    """Return the share of a completion's characters before the first error of Python's parser.

    It is 1 without an error.
    """
    if not completion.strip():
        return 0.0
    try:
        ast.parse(prompt + completion)
    except SyntaxError as error:
        lines = (prompt + completion).splitlines(keepends=True)[: (error.lineno or 1) - 1]
        read = sum(map(len, lines)) + max((error.offset or 1) - 1, 0)
        return min(max(read - len(prompt), 0) / len(completion), 1.0)
    except (
        ValueError,
        RecursionError,
        MemoryError,
    ):  # characters and depths that the parser does not take
        return 0.0
    return 1.0


def text_of(content: Any) -> str:
    """Return a text, or the text of the last of several messages."""
    return str(content if isinstance(content, str) else content[-1]["content"])


def lora_adapters(parser: HfArgumentParser) -> "LoraConfig":
    """Adapters of rank 16 on all linear layers; the option is refused where peft is missing."""
    try:
        from peft import LoraConfig
    except ModuleNotFoundError as error:
        parser.error(f"--use_peft needs peft, which cannot be imported ({error}): pip install peft")
    return LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")


def load_prompts(script_args: ScriptArguments, seed: int, show_progress: bool) -> Dataset:
    """Load the prompts, as TRL takes them, in random order."""
    if script_args.dataset_name is None:
        sources = standard_library(progress=show_progress).shuffle(seed=seed)["text"]
        return Dataset.from_list(list(islice(function_heads(sources), script_args.max_prompts)))
    prompts = hf_distca.load_documents(script_args.dataset_name)
    count = (
        len(prompts)
        if script_args.max_prompts is None
        else min(script_args.max_prompts, len(prompts))
    )
    return prompts.shuffle(seed=seed).select(range(count))


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


def function_heads(sources: Iterable[str]) -> Iterator[dict[str, str]]:
    """Make a prompt of each documented function: its head and its docstring.

    The model writes the body.

    Args:
        sources: texts of Python modules. Those that are not valid Python have no prompt.
    """
    for source in sources:
        try:
            nodes = list(ast.walk(ast.parse(source)))
        except (SyntaxError, ValueError):  # what the parser's own tests are made of
            continue
        for node in nodes:
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
                head = ast.FunctionDef(
                    **{**vars(node), "decorator_list": [], "body": node.body[:1]}
                )
                yield {"prompt": ast.unparse(head) + "\n"}


if __name__ == "__main__":
    main()
