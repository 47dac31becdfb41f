"""Fine-tune a LLaMA checkpoint on whole documents, the core attention of all ranks in balance.

    accelerate launch --config_file examples/configs/ddp.yaml examples/finetune_llama.py \
        --model_name_or_path meta-llama/Llama-3.2-1B --dataset_name my_documents.jsonl --use_peft \
        --output_dir runs/llama --tokens_per_rank 32768 --bf16 --learning_rate 2e-4

A micro-batch is one row of up to tokens_per_rank tokens on each rank. Every option of
transformers.TrainingArguments and of hf_distca.DistCAConfig is one here too; --help lists them.
At the end a table is printed, and written to summary.json in the output folder.
"""

import json
import sysconfig
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING

from datasets import Dataset
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from transformers.distributed import DistributedConfig

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
                "Documents: a text file; a .jsonl, .csv or .parquet file with a document a row; a "
                "folder of such files; or a name on the Hub. Without it, the source files of the "
                "Python standard library."
            )
        },
    )
    max_documents: int | None = field(
        default=None,
        metadata={"help": "Take so many documents, drawn by the seed; all without it."},
    )
    eval_fraction: float = field(
        default=0.05, metadata={"help": "Part of the documents kept for evaluation."}
    )
    use_peft: bool = field(
        default=False, metadata={"help": "Train adapters of rank 16 on all linear layers only."}
    )
    tp_size: int = field(
        default=1,
        metadata={
            "help": "Processes that share each layer; the weights are divided among the others too."
        },
    )


@hf_distca.record  # an error is reported once, and not by every process
def main() -> None:
    """Read the options, prepare documents and model, train, evaluate, report."""
    parser = HfArgumentParser(
        (ScriptArguments, hf_distca.DistCATrainingArguments), usage="%(prog)s [OPTIONS]"
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

    # The data: every rank gets all documents, in the same order, and picks its rows when a plan
    # says so.
    tokenizer = AutoTokenizer.from_pretrained(script_args.model_name_or_path)
    with training_args.main_process_first(desc="loading"):
        texts = load_texts(script_args, show_progress=training_args.process_index == 0)
        texts = texts.shuffle(seed=training_args.seed)
        if script_args.max_documents is not None:
            texts = texts.select(range(min(script_args.max_documents, len(texts))))
    parts = texts.train_test_split(test_size=script_args.eval_fraction, seed=training_args.seed)

    # The model: "distca" is the only thing that differs from any other fine-tuning.
    divided = {}
    if script_args.tp_size > 1:
        shards = training_args.world_size // script_args.tp_size
        divided["distributed_config"] = DistributedConfig(
            tp_size=script_args.tp_size, fsdp_size=shards
        )
    model = AutoModelForCausalLM.from_pretrained(
        script_args.model_name_or_path, attn_implementation="distca", **divided
    )
    if adapters is not None:
        from peft import get_peft_model

        model = get_peft_model(model, adapters)

    trainer = hf_distca.DistCATrainer(
        model=model,
        args=training_args,
        train_dataset=parts["train"],
        eval_dataset=parts["test"],
        processing_class=tokenizer,  # makes tokens of the text in the column --dataset_text_field
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    metrics = trainer.evaluate()
    trainer.save_model()

    if trainer.is_world_process_zero():
        check_weights(Path(training_args.output_dir))
        summary = summarize(trainer.state.log_history, metrics, trainer.train_dataset)
        Path(training_args.output_dir, "summary.json").write_text(
            json.dumps(summary, indent=2) + "\n"
        )
        print_table(summary, training_args.world_size, training_args.output_dir)
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


def load_texts(script_args: ScriptArguments, show_progress: bool) -> Dataset:
    """Load the documents, as text."""
    if script_args.dataset_name is None:
        return standard_library(progress=show_progress)
    return hf_distca.load_documents(script_args.dataset_name)


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


def summarize(
    log_history: list[dict[str, float]], metrics: dict[str, float], documents: Dataset
) -> dict[str, float]:
    """Summarise the run; without logged steps only the evaluation and the documents."""
    steps = [entry for entry in log_history if "loss" in entry]
    tokens = sum(map(len, documents["input_ids"]))
    summary = {"eval_loss": metrics["eval_loss"], "documents": len(documents), "tokens": tokens}
    if not steps:
        return summary
    return {
        "loss_first": steps[0]["loss"],
        "loss_last": steps[-1]["loss"],
        **summary,
        "imbalance_degree_as_packed": mean(
            entry["distca/imbalance_degree_packed"] for entry in steps
        ),
        "imbalance_degree_planned": mean(entry["distca/imbalance_degree"] for entry in steps),
        "tokens_per_second": median(entry["distca/tokens_per_second"] for entry in steps),
    }


def print_table(summary: dict[str, float], ranks: int, output_dir: str) -> None:
    """Print the summary as a table."""
    documents = (
        "Training documents",
        f"{summary['documents']:,} of {summary['tokens']:,} tokens in all",
    )
    evaluation = ("Evaluation loss", f"{summary['eval_loss']:.3f}")
    if "loss_first" in summary:
        rows = [
            documents,
            ("Loss", f"{summary['loss_first']:.3f} at first, {summary['loss_last']:.3f} at last"),
            evaluation,
            ("Query-key pairs of the busiest rank, over the mean", ""),
            ("  documents packed in order", f"{summary['imbalance_degree_as_packed']:.3f}"),
            ("  as planned", f"{summary['imbalance_degree_planned']:.3f}"),
            ("Speed", f"{summary['tokens_per_second']:,.0f} tokens/s on {ranks} ranks"),
        ]
    else:
        rows = [documents, evaluation, ("Loss, pairs and speed", "not logged: see --logging_steps")]
    width = max(len(name) for name, _ in rows)
    print("\n" + "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in rows))
    print(f"\nModel and summary.json: {output_dir}")


if __name__ == "__main__":
    main()
