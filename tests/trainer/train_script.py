"""What the launch tests run under `accelerate launch`: a short training whose losses go to a file.

    train_script.py OPTIONS.json

OPTIONS: output (where rank 0 writes the results), lengths (of the documents), fsdp2 (whether to make
accelerate take CPU processes for FSDP2), model (config of a small model), arguments (of
DistCATrainingArguments), lora, streaming, flattening, resume, pauses (for
some steps, a file until whose existence training stands still after the step).
"""

import json
import sys
import time
from pathlib import Path

import accelerate
import datasets
import peft
import torch
import transformers
from transformers import DataCollatorWithFlattening

import hf_distca
from tests.models import random_documents, small_model


def shard_on_cpu() -> None:
    """Make accelerate shard on CPU processes, which it otherwise silently runs as DDP."""
    gloo = ("gloo", accelerate.DistributedType.MULTI_GPU)
    accelerate.PartialState._prepare_backend = lambda self, *args, **kwargs: gloo


class Pauses(transformers.TrainerCallback):
    """Stands still after some steps until a file exists; a file NAME.reached says that it does."""

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


def main() -> None:
    """Train and write losses, logs and, of rank 0, a checksum of the parameters."""
    with open(sys.argv[1]) as file:
        options = json.load(file)
    torch.set_num_threads(1)
    if options.get("fsdp2"):
        shard_on_cpu()
    # Before the arguments: once those know of ZeRO-3, a model's parameters are drawn in another way.
    model = small_model(**options.get("model", {"model_type": "llama"}))
    if options.get("lora"):
        torch.manual_seed(0)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    args = hf_distca.DistCATrainingArguments(
        disable_tqdm=True,
        report_to=[],
        logging_steps=1,
        dataloader_pin_memory=False,
        lr_scheduler_type="constant",
        **options["arguments"],
    )
    documents = [{"input_ids": document.tolist()} for document in random_documents(options["lengths"])]
    if options.get("streaming"):
        dataset = datasets.IterableDataset.from_generator(lambda: iter(documents))
    else:
        dataset = datasets.Dataset.from_list(documents)
    trainer = hf_distca.DistCATrainer(
        model=model,
        args=args,
        train_dataset=dataset,
        eval_dataset=dataset,
        data_collator=DataCollatorWithFlattening() if options.get("flattening") else None,
    )
    if options.get("pauses"):
        trainer.add_callback(Pauses(options["pauses"]))
    trainer.train(resume_from_checkpoint=options.get("resume"))
    evaluation = trainer.evaluate()
    if trainer.is_world_process_zero():
        result = {
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
            "history": trainer.state.log_history,
            "eval_loss": evaluation["eval_loss"],
            "distributed_type": str(trainer.accelerator.distributed_type),
            "world_size": args.world_size,
        }
        with open(options["output"], "w") as file:
            json.dump(result, file)
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
