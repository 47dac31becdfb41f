"""The trainings that axolotl and ms-swift are compared with, by scripts of transformers.

Each optimizer step trains on all documents, so that losses do not depend on their order.
"""

import json
import sys
from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
)

import hf_distca

kind = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained("checkpoint")
tokenizer.pad_token = tokenizer.eos_token
texts = [json.loads(line)["text"] for line in Path("documents.jsonl").read_text().splitlines()]
tokens = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
documents: Any = [{"input_ids": document, "labels": document} for document in tokens]
settings: dict[str, Any] = {
    "output_dir": kind,
    "num_train_epochs": 4,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "optim": "adamw_torch",
    "logging_steps": 1,
    "save_strategy": "epoch",
    "report_to": "none",
    "use_cpu": True,
    "seed": 42,
}
model = AutoModelForCausalLM.from_pretrained("checkpoint", dtype="float32")
if kind == "distca":
    args = hf_distca.DistCATrainingArguments(
        tokens_per_rank="1k", gradient_accumulation_steps=8, **settings
    )
    hf_distca.DistCATrainer(model, args, train_dataset=documents).train()
else:
    args = TrainingArguments(
        per_device_train_batch_size=1, gradient_accumulation_steps=len(documents), **settings
    )
    Trainer(
        model, args, train_dataset=documents, data_collator=DataCollatorForSeq2Seq(tokenizer)
    ).train()
