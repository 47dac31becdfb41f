"""A short training that tests run under `accelerate launch`.

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

import torch
import transformers

from tests.logged import Messages
from tests.trainer.small_trainers import make_trainer


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


def main(file: str) -> None:
    """Train as the run says."""
    options = json.loads(Path(file).read_text())
    run = options["runs"]["run"]
    torch.set_num_threads(1)
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True  # with use_cpu there is no DeepSpeed
    folder = run["arguments"].pop("output_dir")
    pool_log = Messages("hf_distca.pool")
    trainer = make_trainer(folder, lengths=run["lengths"], environment={}, **run["arguments"])
    trainer.add_callback(Pauses(run["pauses"]))
    trainer.train()
    pool_log.end()
    if int(os.environ["RANK"]) == 0:
        history = trainer.state.log_history
        result = {
            "losses": [entry["loss"] for entry in history if "loss" in entry],
            "history": history,
            "world_size": trainer.args.world_size,
            "pool_log": pool_log.lines,
        }
        Path(options["output"]).write_text(json.dumps({"run": result}))
    # A gloo thread that still lets go of its last tensors would abort the process on its way out, or never end.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
