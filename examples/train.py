"""Fine-tune a language model on documents; --help lists all settings.

accelerate launch --config_file examples/configs/ddp.yaml examples/train.py MODEL DOCUMENTS...
[OPTIONS]
"""

import torch
from transformers import HfArgumentParser

import hf_distca


@hf_distca.record  # an error is reported once, and not by every process
def main() -> None:
    """Read the options and train."""
    parser = HfArgumentParser(
        hf_distca.DistCATrainingArguments,
        usage="%(prog)s MODEL DOCUMENTS... [OPTIONS]",
        description=__doc__,
    )
    parser.add_argument("model", help="a folder, or a name on the Hub")
    parser.add_argument(
        "documents",
        nargs="+",
        help=(
            "text files (.txt, .md), one document each; .jsonl, .csv or .parquet files, a document "
            "a row; a folder of such files; or a name on the Hub"
        ),
    )
    parser.add_argument(
        "--sample_by",
        choices=("document", "paragraph"),
        default="document",
        help="divide text files",
    )
    parser.set_defaults(
        output_dir="runs/train",
        tokens_per_rank=4096,  # the most that a process holds at a time: 32k and more on GPUs
        long_documents="split",  # those longer than all processes hold together
        bf16=torch.cuda.is_available(),
        logging_steps=10,
        logging_first_step=True,
    )
    args, given, unknown = parser.parse_args_into_dataclasses(return_remaining_strings=True)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; --help lists all")

    documents = hf_distca.load_documents(given.documents, sample_by=given.sample_by)
    trainer = hf_distca.DistCATrainer(model=given.model, args=args, train_dataset=documents)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.create_model_card()
    if trainer.is_world_process_zero():
        print(
            f"\nThe model: {args.output_dir}. Load it with "
            f"AutoModelForCausalLM.from_pretrained({args.output_dir!r})"
        )


if __name__ == "__main__":
    main()
