"""What the launch tests run under `accelerate launch`: one short training after another.

    train_script.py OPTIONS.json

OPTIONS: output (where rank 0 writes the results of the runs, by name) and runs: for each name a dict of

    lengths      of the documents
    arguments    of DistCATrainingArguments
    model        config of a small model, with its model_type
    lora         train adapters of q_proj and v_proj only
    watched      note the shapes of tensors of tokens × vocabulary
    sft          with TRL's trainer of chats
    sets         evaluation data: for each name how many of the documents, from the first on. All unless given
    patience     training stops after so many evaluations that were no better than the best
    generates    after each step so many tokens are generated
    environment  what options of `accelerate launch` would set for this run alone
    calls        of the trainer, one after another; "new trainer" goes on with another one on the same model.
                 ["train", "evaluate"] unless given
    resume       checkpoint that training resumes from, as RUN/FOLDER of an earlier run
    save         save the trained model in the folder "saved" of the run's output
    pauses       for some steps, a file until whose existence training stands still after the step
"""

import gc
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import datasets
import peft
import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor

import hf_distca
from tests.logged import Messages
from tests.models_and_batches import exchanging, random_documents, small_model
from tests.trainer.chats import tokenizer
from tests.whole_logits import WholeLogits

VOCABULARY = 67
"""A size that nothing else has, so that tensors of tokens × vocabulary can be told."""


def allow_bf16() -> None:
    """Let transformers take CPU processes for devices with bfloat16; with use_cpu there is no DeepSpeed."""
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True


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


class Generates(transformers.TrainerCallback):
    """Generates from the model as it is after each step, on every rank."""

    def __init__(self, tokens: int, result: dict[str, Any]) -> None:
        self._tokens, self._generated = tokens, result.setdefault("generated", [])

    def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
        """Generate."""
        self._generated.append(generated(model, self._tokens))


def generated(model: nn.Module, tokens: int) -> list[int]:
    """The most probable continuation of a few words."""
    prompt = torch.tensor([[5, 9, 17, 33]])
    given = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0}
    return model.generate(prompt, min_new_tokens=tokens, max_new_tokens=tokens, **given)[0].tolist()


def make_model(run: dict[str, Any], implementation: str = "distca") -> nn.Module:
    """The model of a run as it is before training."""
    config = {"model_type": "llama", "vocab_size": VOCABULARY, **run.get("model", {})}
    model = small_model(implementation=implementation, **config)
    if run.get("lora"):
        torch.manual_seed(0)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return model


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Environment variables for a while."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def make_trainer(model: nn.Module, run: dict[str, Any], result: dict[str, Any]) -> hf_distca.DistCATrainer:
    """The trainer of a run; forwards of its kernel are counted into the result."""
    make_arguments = hf_distca.DistCASFTConfig if run.get("sft") else hf_distca.DistCATrainingArguments
    args = make_arguments(
        disable_tqdm=True,
        report_to=[],
        logging_steps=1,
        dataloader_pin_memory=False,
        lr_scheduler_type="constant",
        **{"bf16": False, **exchanging(model), **run["arguments"]},
    )
    documents = [{"input_ids": document.tolist()} for document in random_documents(run["lengths"])]
    dataset = datasets.Dataset.from_list(documents)
    sets = {name: dataset.select(range(count)) for name, count in run.get("sets", {}).items()}
    kind, others = hf_distca.DistCATrainer, {}
    if run.get("sft"):
        kind, others = hf_distca.DistCASFTTrainer, {"processing_class": tokenizer()}
    trainer = kind(model=model, args=args, train_dataset=dataset, eval_dataset=sets or dataset, **others)
    if run.get("patience"):
        trainer.add_callback(transformers.EarlyStoppingCallback(run["patience"]))
    if run.get("generates"):
        trainer.add_callback(Generates(run["generates"], result))
    if run.get("pauses"):
        trainer.add_callback(Pauses(run["pauses"]))
    count_kernel_forwards(trainer, result)
    return trainer


def train(model: nn.Module, run: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Do what a run says; its losses, logs and figures, or the error that it ended with on this rank."""
    result: dict[str, Any] = {"losses": [], "evaluations": [], "kernel_forwards": 0}
    watched = WholeLogits(VOCABULARY, rows=48) if run.get("watched") else nullcontext()
    resume = str(folder / run["resume"]) if "resume" in run else None
    pool_log = Messages("hf_distca.pool")
    try:
        trainer = make_trainer(model, run, result)
        for call in run.get("calls", ["train", "evaluate"]):
            if call == "train":
                with watched:
                    trainer.train(resume_from_checkpoint=resume)
                result["losses"] += [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            elif call == "evaluate":
                with watched:
                    metrics = trainer.evaluate()
                result["evaluations"] += [value for name, value in metrics.items() if name.endswith("_loss")]
            else:
                trainer = make_trainer(model, run, result)
        if run.get("save"):
            trainer.save_model(str(Path(trainer.args.output_dir) / "saved"))
    except ValueError as error:  # raised on all ranks together: the next run can start
        return {**result, "error": str(error)}
    finally:
        pool_log.end()
    return {
        **result,
        "history": trainer.state.log_history,
        "distributed_type": str(trainer.accelerator.distributed_type),
        "world_size": trainer.args.world_size,
        "parameters": trainer.dispatcher.groups.all_gather(parameters_hash(model)),
        "whole_logits": getattr(watched, "shapes", None),
        "pool_log": pool_log.lines,
    }


def parameters_hash(model: nn.Module) -> str:
    """A hash of what this rank holds of the parameters."""
    tensors = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    content = b"".join(tensor.detach().cpu().contiguous().view(torch.uint8).numpy() for tensor in tensors)
    return hashlib.sha256(content).hexdigest()


def count_kernel_forwards(trainer: hf_distca.DistCATrainer, result: dict[str, Any]) -> None:
    """Count into the result how often the attention kernel runs forward on this rank."""
    kernel = trainer.dispatcher.kernel
    forward = kernel.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        result["kernel_forwards"] += 1
        return forward(*args, **kwargs)

    kernel.forward = counted


def main(file: str) -> None:
    """Train as each run says; rank 0 writes the results after each run."""
    options = json.loads(Path(file).read_text())
    torch.set_num_threads(1)
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        allow_bf16()
    # All before the first arguments: once those know of ZeRO-3, a model's parameters are drawn in another way.
    models = {name: make_model(run) for name, run in options["runs"].items()}
    results: dict[str, Any] = {}
    modules = 0
    for name, run in options["runs"].items():
        if len(sys.modules) > modules:
            gc.freeze()  # a collection looks through all that was imported, and a training makes two
            modules = len(sys.modules)
        with environment(run.get("environment", {})):
            results[name] = train(models.pop(name), run, Path(options["output"]).parent)
        if int(os.environ["RANK"]) == 0:
            Path(options["output"]).write_text(json.dumps(results))
    # A gloo thread that still lets go of its last tensors would abort the process on its way out, or never end.
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
