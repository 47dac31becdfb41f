"""Fine-tune a model on chats with TRL, the core attention of all ranks in balance.

    accelerate launch --config_file examples/configs/ddp.yaml examples/sft_chat.py \
        --model Qwen/Qwen3-0.6B --dataset trl-lib/Capybara --assistant_only_loss --lora \
        --output_dir runs/chat --tokens_per_rank 32768 --learning_rate 2e-4

Without --dataset the chats are about the Python standard library: what its functions do, answered by their docstrings,
one chat per module. Every option of trl.SFTConfig and of hf_distca.DistCAConfig is one here too; --help lists them.
At the end a table is printed, and written to summary.json in the output folder.
"""

import ast
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from datasets import Dataset
from finetune_llama import check_weights, load_named, lora_adapters
from standard_library import standard_library
from transformers import AutoTokenizer, HfArgumentParser

import hf_distca

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
"""For tokenizers that have none; what stands between generation and endgeneration is the assistant's."""


@dataclass
class ScriptArguments:
    """What to train, on what."""

    model: str = field(metadata={"help": "Checkpoint: a name on the Hub or a folder."})
    dataset: str | None = field(
        default=None,
        metadata={
            "help": "Chats: a name on the Hub, a folder, or a .jsonl or .parquet file; its split 'train'. Columns as "
            "TRL takes them: messages, or prompt and completion. Without it, chats about the standard library."
        },
    )
    max_chats: int | None = field(
        default=None, metadata={"help": "Take so many chats, drawn by the seed; all without it."}
    )
    eval_fraction: float = field(default=0.05, metadata={"help": "Part of the chats kept for evaluation."})
    lora: bool = field(default=False, metadata={"help": "Train adapters of rank 16 on all linear layers only."})


def main() -> None:
    """Read the options, prepare chats and tokenizer, train, evaluate, report."""
    parser = HfArgumentParser((ScriptArguments, hf_distca.DistCASFTConfig))
    parser.set_defaults(logging_steps=5, logging_first_step=True)  # the table is made of what is logged
    script_args, training_args = parser.parse_args_into_dataclasses()
    training_args.serve_if_server()
    adapters = lora_adapters() if script_args.lora else None

    # Every rank gets all chats, in the same order; TRL makes documents of them, and a plan says who holds which rows.
    with training_args.main_process_first(desc="loading"):
        chats = load_chats(script_args, training_args.seed, show_progress=training_args.process_index == 0)
    parts = chats.train_test_split(test_size=script_args.eval_fraction, seed=training_args.seed)

    tokenizer = AutoTokenizer.from_pretrained(script_args.model)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = CHAT_TEMPLATE

    trainer = hf_distca.DistCASFTTrainer(
        model=script_args.model,  # loaded with attn_implementation="distca"
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
        Path(training_args.output_dir, "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        width = max(map(len, summary))
        print("\n" + "\n".join(f"{name:<{width}}  {value:.6g}" for name, value in summary.items()))
    # A gloo thread that still lets go of its last tensors would abort the process on its way out, or never end.
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


def load_chats(script_args: ScriptArguments, seed: int, show_progress: bool) -> Dataset:
    """The chats, as TRL takes them, in random order."""
    if script_args.dataset is None:
        sources = standard_library(progress=show_progress).shuffle(seed=seed)["text"]
        return Dataset.from_list(list(islice(library_chats(sources), script_args.max_chats)))
    chats = load_named(script_args.dataset)
    count = len(chats) if script_args.max_chats is None else min(script_args.max_chats, len(chats))
    return chats.shuffle(seed=seed).select(range(count))


def library_chats(sources: Iterable[str]) -> Iterator[dict[str, list[dict[str, str]]]]:
    """A chat about each source file: what each of its documented functions does.

    Args:
        sources: texts of Python modules. Those without a documented function have no chat, nor have those that are
            not valid Python.

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
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (answer := ast.get_docstring(node)):
                question = f"What does `{node.name}({ast.unparse(node.args)})` do?"
                messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        if messages:
            yield {"messages": messages}


def summarize(log_history: list[dict[str, float]], metrics: dict[str, float], chats: int) -> dict[str, float]:
    """What the run came to; figures that the trainer logs on the way are left out where it logged nothing."""
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
