"""A dedicated attention server on the trainer's own device, killed once: training goes on with the
same losses.
"""

import logging
import subprocess
import sys
import tempfile
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.models import small_model
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.training import arguments
from benchmarks.harness import end_with_parent, free_port
from benchmarks.harness.models import documents_of
from hf_distca import DistCATrainer, DistCATrainingArguments

STEPS = 6
JOINS, KILLED = 1, 4
"""Steps before which the server joins and is killed."""
LOSS_BOUNDS = {torch.bfloat16: 2e-3, torch.float32: 1e-6}
"""Largest difference of a loss with and without the server by dtype, over the loss."""
JOIN_S, TIMEOUT_S = 90, 10
"""Seconds to join, and seconds after which a silent server is lost."""


class Fate(TrainerCallback):
    """Lets a server join, and kills it.

    Attributes:
        trainer: who it joins.
        served: servers that took part, by step.
    """

    trainer: DistCATrainer

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self.served: list[int] = []

    def on_step_begin(self, args: Any, state: Any, *_args: Any, **_kwargs: Any) -> None:
        """Start the server before its step, and kill it after its last one."""
        pool: Any = self.trainer.dispatcher.remote
        if state.global_step == JOINS:
            command = [
                sys.executable,
                "-m",
                "hf_distca.cli.main",
                "serve",
                "--join",
                args.attention_servers.address,
            ]
            command += [
                "--token-file",
                args.attention_servers.token_file,
                "--device",
                str(args.device),
            ]
            self._server = subprocess.Popen(command, preexec_fn=end_with_parent)
            pool.wait_for(1, JOIN_S)
            if not pool.servers:
                raise RuntimeError(f"the server did not join in {JOIN_S} s")
        self.served.append(len(pool.servers))
        if state.global_step == KILLED:
            self.close()

    def close(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()


def train(setting: Setting, fate: Fate | None, folder: str, **options: Any) -> list[float]:
    args = DistCATrainingArguments(
        tokens_per_rank=sum(setting.lengths),
        **{**arguments(setting, folder, STEPS), "learning_rate": 1e-3},
        bf16=setting.dtype.itemsize == 2,
        **options,
    )
    trainer = DistCATrainer(
        model=small_model(setting, "distca"),
        args=args,
        train_dataset=[
            {"input_ids": document.tolist()} for document in documents_of(setting.lengths * STEPS)
        ],
        callbacks=[] if fate is None else [fate],
    )
    if fate is not None:
        fate.trainer = trainer
    trainer.train()
    if trainer.dispatcher.remote is not None:
        trainer.dispatcher.remote.close()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def check_server(setting: Setting) -> Findings:
    """The same steps with a server that joins and is killed, and without one."""
    findings, warnings, fate = Findings(), BufferingHandler(1000), Fate()
    warnings.setLevel(logging.WARNING)
    logger = logging.getLogger("hf_distca")
    logger.addHandler(warnings)
    with tempfile.TemporaryDirectory() as folder:
        expected = train(setting, None, folder)
        try:
            losses = train(
                setting,
                fate,
                folder,
                attention_servers={
                    "count": "external",
                    "address": f"127.0.0.1:{free_port()}",
                    "token_file": str(Path(folder, "token")),
                    "timeout": TIMEOUT_S,
                },
            )
        finally:
            fate.close()
            logger.removeHandler(warnings)
    findings.figures = {"servers": fate.served, "losses": losses, "losses_without": expected}
    texts = findings.figures["warnings"] = [record.getMessage() for record in warnings.buffer]
    wanted = [int(JOINS <= step <= KILLED) for step in range(STEPS)]
    findings.check(
        fate.served == wanted, f"so many servers took part: {fate.served}, {wanted} were expected"
    )
    finished = any("computed by the ranks" in text for text in texts)
    findings.check(
        finished, f"the trainer did not compute the server's last call; it warned of {texts}"
    )
    findings.check(
        len(losses) == len(expected) == STEPS, f"{len(losses)} losses were logged, expected {STEPS}"
    )
    for number, (mine, theirs) in enumerate(zip(losses, expected, strict=False)):
        difference = abs(mine - theirs) / theirs
        findings.at_most(
            difference, LOSS_BOUNDS[setting.dtype], f"difference of the loss of step {number}"
        )
    return findings
