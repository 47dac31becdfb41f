"""Fine-tune a model on chats with TRL, the core attention of all ranks in balance.

    accelerate launch --config_file examples/configs/ddp.yaml examples/sft_chat.py \
        --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/Capybara \
        --assistant_only_loss --use_peft --output_dir runs/chat --tokens_per_rank 32768 \
        --learning_rate 2e-4

Without --dataset_name the chats are about the Python standard library: what its functions do,
answered by their docstrings, one chat per module. Every option of trl.SFTConfig and of
hf_distca.DistCAConfig is one here too; --help lists them.

At the end a table is printed, and written to summary.json in the output folder.
"""

import ast
import json
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from datasets import Dataset
from tqdm.auto import tqdm
from transformers import AutoTokenizer, HfArgumentParser

import hf_distca

if TYPE_CHECKING:
    from peft import LoraConfig

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<' + message.role + '>\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content + eos_token }}{% endgeneration %}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>\\n' }}{% endif %}"""
"""For tokenizers that have none.

What stands between generation and endgeneration is the assistant's.
"""


@dataclass
class ScriptArguments:
    """What to train, on what."""

    model_name_or_path: str = field(metadata={"help": "Checkpoint: a name on the Hub or a folder."})
    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": (
                "Chats: a .jsonl or .parquet file with a chat a row, a folder of such files, or a"
                " name on the Hub. Columns as TRL takes them: messages, or prompt and completion."
                " Without it, chats about the standard library."
            )
        },
    )
    max_chats: int | None = field(
        default=None, metadata={"help": "Take so many chats, drawn by the seed; all without it."}
    )
    eval_fraction: float = field(
        default=0.05, metadata={"help": "Part of the chats kept for evaluation."}
    )
    use_peft: bool = field(
        default=False, metadata={"help": "Train adapters of rank 16 on all linear layers only."}
    )


@hf_distca.record  # an error is reported once, and not by every process
def main() -> None:
    """Read the options, prepare chats and tokenizer, train, evaluate, report."""
    parser = HfArgumentParser(
        (ScriptArguments, hf_distca.DistCASFTConfig), usage="%(prog)s [OPTIONS]"
    )
    parser.set_defaults(
        logging_steps=5, logging_first_step=True
    )  # the table is made of what is logged
    script_args, training_args, unknown = parser.parse_args_into_dataclasses(
        return_remaining_strings=True
    )
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; --help lists all")
    training_args.serve_if_server()
    adapters = lora_adapters(parser) if script_args.use_peft else None

    # Every rank gets all chats, in the same order; TRL makes documents of them, and a plan says who
    # holds which rows.
    with training_args.main_process_first(desc="loading"):
        chats = load_chats(
            script_args, training_args.seed, show_progress=training_args.process_index == 0
        )
    parts = chats.train_test_split(test_size=script_args.eval_fraction, seed=training_args.seed)

    tokenizer = AutoTokenizer.from_pretrained(script_args.model_name_or_path)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = CHAT_TEMPLATE

    trainer = hf_distca.DistCASFTTrainer(
        model=script_args.model_name_or_path,  # gets planned attention
        args=training_args,
        train_dataset=parts["train"],
        eval_dataset=parts["test"],
        processing_class=tokenizer,
        peft_config=adapters,
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    metrics = trainer.evaluate()
    trainer.save_model()

    if trainer.is_world_process_zero():
        check_weights(Path(training_args.output_dir))
        summary = summarize(trainer.state.log_history, metrics, len(parts["train"]))
        Path(training_args.output_dir, "summary.json").write_text(
            json.dumps(summary, indent=2) + "\n"
        )
        width = max(map(len, summary))
        print("\n" + "\n".join(f"{name:<{width}}  {value:.6g}" for name, value in summary.items()))
    # A gloo thread that still lets go of its last tensors would abort the process on its way out,
    # or never end.
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


def lora_adapters(parser: HfArgumentParser) -> "LoraConfig":
    """Adapters of rank 16 on all linear layers; the option is refused where peft is missing."""
    try:
        from peft import LoraConfig
    except ModuleNotFoundError as error:
        parser.error(f"--use_peft needs peft, which cannot be imported ({error}): pip install peft")
    return LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")


def check_weights(folder: Path) -> None:
    """Raise unless the model's weights, or its adapters', are in the folder."""
    if not any(folder.glob("*.safetensors")):
        raise FileNotFoundError(f"training has ended, but there are no weights in {folder}")


def load_chats(script_args: ScriptArguments, seed: int, show_progress: bool) -> Dataset:
    """Load the chats, as TRL takes them, in random order."""
    if script_args.dataset_name is None:
        sources = standard_library(progress=show_progress).shuffle(seed=seed)["text"]
        return Dataset.from_list(list(islice(library_chats(sources), script_args.max_chats)))
    chats = hf_distca.load_documents(script_args.dataset_name)
    count = len(chats) if script_args.max_chats is None else min(script_args.max_chats, len(chats))
    return chats.shuffle(seed=seed).select(range(count))


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


def library_chats(sources: Iterable[str]) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Make a chat about each source file: what each of its documented functions does.

    Args:
        sources: texts of Python modules. A module without a documented function has no chat, nor
            has a module that is not valid Python.

    Returns:
        Examples with `messages`, questions and answers in turns.
    """
    for source in sources:
        try:
            nodes = list(ast.walk(ast.parse(source)))
        except (SyntaxError, ValueError):  # what the parser's own tests are made of
            continue
        messages = []
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
                answer := ast.get_docstring(node)
            ):
                question = f"What does `{node.name}({ast.unparse(node.args)})` do?"
                messages += [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer},
                ]
        if messages:
            yield {"messages": messages}


def summarize(
    log_history: list[dict[str, float]], metrics: dict[str, float], chats: int
) -> dict[str, float]:
    """Summarise the run; without logged steps only the evaluation and the chats."""
    steps = [entry for entry in log_history if "loss" in entry]
    evaluated = {name: metrics[name] for name in ("eval_loss", "eval_mean_token_accuracy")}
    if not steps:
        return {**evaluated, "chats": chats}
    last = steps[-1]
    return {
        "loss_first": steps[0]["loss"],
        "loss_last": last["loss"],
        **evaluated,
        "chats": chats,
        "tokens": last["num_tokens"],
        "imbalance_degree": last["distca/imbalance_degree"],
        "tokens_per_second": last["distca/tokens_per_second"],
    }


if __name__ == "__main__":
    main()
