"""What tests run under `accelerate launch`: one short training.

    train_script.py OPTIONS.json

OPTIONS: output (where rank 0 writes the result) and runs: {"run": a dict of

    lengths      of the documents
    arguments    of DistCATrainingArguments
    pauses       for some steps, a file until whose existence training stands still after the step}
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers

import hf_distca
from tests.logged import Messages
from tests.models_and_batches import exchanging, random_documents, small_model


class Pauses(transformers.TrainerCallback):
    """Stands still after some steps until a file exists, and creates NAME.reached beside the file meanwhile."""

    def __init__(self, files: dict[str, str]) -> None:
        self._files = {int(step): Path(file) for step, file in files.items()}

    def on_step_end(self, args, state, control, **kwargs) -> None:
        """Wait, two minutes at most."""
        file, end = self._files.get(state.global_step), time.monotonic() + 120
        if file is None:
            return
        file.with_suffix(".reached").touch()
        while not file.exists() and time.monotonic() < end:
            time.sleep(0.05)


def train(run: dict[str, Any]) -> dict[str, Any]:
    """The losses, the logs and the servers' messages of a training."""
    model = small_model()
    args = hf_distca.DistCATrainingArguments(
        disable_tqdm=True,
        report_to=[],
        logging_steps=1,
        dataloader_pin_memory=False,
        lr_scheduler_type="constant",
        **{"bf16": False, **exchanging(model), **run["arguments"]},
    )
    documents = [{"input_ids": document.tolist()} for document in random_documents(run["lengths"])]
    dataset = datasets.Dataset.from_list(documents)
    pool_log = Messages("hf_distca.pool")
    trainer = hf_distca.DistCATrainer(model=model, args=args, train_dataset=dataset)
    trainer.add_callback(Pauses(run["pauses"]))
    trainer.train()
    pool_log.end()
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "history": trainer.state.log_history,
        "world_size": trainer.args.world_size,
        "pool_log": pool_log.lines,
    }


def main(file: str) -> None:
    """Train as the run says; rank 0 writes the result."""
    options = json.loads(Path(file).read_text())
    torch.set_num_threads(1)
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    result = train(options["runs"]["run"])
    if int(os.environ["RANK"]) == 0:
        Path(options["output"]).write_text(json.dumps({"run": result}))
    # A gloo thread that still lets go of its last tensors would abort the process on its way out, or never end.
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
