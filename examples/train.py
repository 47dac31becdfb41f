"""Fine-tune a language model on plain text; --help lists all settings.

accelerate launch --config_file examples/configs/ddp.yaml examples/train.py MODEL TEXT... [--learning_rate 1e-5 ...]
"""

import torch
from datasets import load_dataset
from transformers import HfArgumentParser

import hf_distca

parser = HfArgumentParser(hf_distca.DistCATrainingArguments, description=__doc__)
parser.add_argument("model", help="a folder, or a name on the Hub")
parser.add_argument(
    "text", nargs="+", help="a file whose documents stand between blank lines; or files, each one document"
)
parser.set_defaults(
    output_dir="runs/train",
    tokens_per_rank=4096,  # the most that a process holds at a time: 32k and more on GPUs
    long_documents="split",  # those longer than all processes hold together
    bf16=torch.cuda.is_available(),
    ddp_find_unused_parameters=False,  # text trains every parameter of a text model
    logging_steps=10,
)
args, given = parser.parse_args_into_dataclasses()

documents = load_dataset(
    "text", data_files=given.text, split="train", sample_by="document" if len(given.text) > 1 else "paragraph"
)
trainer = hf_distca.DistCATrainer(model=given.model, args=args, train_dataset=documents)
trainer.train()
trainer.save_model()
