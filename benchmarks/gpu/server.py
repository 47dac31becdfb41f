"""A dedicated attention server on the trainer's own device, killed once: training goes on with the same losses."""

import logging
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.models import small_model
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.training import arguments
from benchmarks.harness import free_port
from benchmarks.harness.models import documents_of
from hf_distca import DistCATrainer, DistCATrainingArguments

STEPS = 6
JOINS, KILLED = 1, 4
"""Steps before which the server joins and is killed."""
LOSS_BOUNDS = {torch.bfloat16: 2e-3, torch.float32: 1e-6}
"""Largest difference of a loss with and without the server by dtype, over the loss."""
JOIN_S = 90
TIMEOUT_S = 10
"""Seconds after which a silent server is lost."""


class Server:
    """A server in a process of its own.

    Args:
        address: HOST:PORT where it joins.
        token_file: with the run's token.
        device: that it computes on.
    """

    def __init__(self, address: str, token_file: Path, device: str) -> None:
        command = [sys.executable, "-m", "hf_distca.cli.main", "serve", "--join", address]
        command += ["--token-file", str(token_file), "--device", device]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._said: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.append(line.strip())
            print("the server:", self._said[-1], flush=True)  # should the part be ended while it waits

    def kill(self) -> None:
        """End it without a warning."""
        self._process.kill()
        self._process.wait()

    @property
    def said(self) -> str:
        """What it has printed."""
        return " / ".join(self._said[-5:])


class Fate(TrainerCallback):
    """Lets a server join, and kills it.

    Attributes:
        trainer: who it joins.
        served: servers that took part, by step.
    """

    trainer: DistCATrainer

    def __init__(self, token_file: Path) -> None:
        self._token_file = token_file
        self._server: Server | None = None
        self.served: list[int] = []

    def on_step_begin(self, args: Any, state: Any, *_args: Any, **_kwargs: Any) -> None:
        """Do what the step is for."""
        pool = self.trainer.pool
        if state.global_step == JOINS:
            self._server = Server(args.attention_server_address, self._token_file, str(args.device))
            pool.wait_for(1, JOIN_S)
            if not pool.servers:
                raise RuntimeError(f"the server did not join in {JOIN_S} s; it said: {self._server.said}")
        self.served.append(len(pool.servers))
        if state.global_step == KILLED:
            self.close()

    def close(self) -> None:
        """Kill the server if there is one."""
        if self._server is not None:
            self._server.kill()


class Warnings(logging.Handler):
    """Keeps what the library warns of.

    Attributes:
        said: the messages.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.said.append(record.getMessage())


def train(setting: Setting, fate: Fate | None, folder: str, **options: Any) -> list[float]:
    """Losses of a few steps, with a server or without."""
    lengths = [length for _ in range(STEPS) for length in setting.lengths]
    half = setting.dtype.itemsize == 2
    args = DistCATrainingArguments(
        tokens_per_rank=sum(setting.lengths),
        **{**arguments(setting, folder, STEPS), "learning_rate": 1e-3},
        bf16=half,
        **options,
    )
    trainer = DistCATrainer(
        model=small_model(setting, "distca"),
        args=args,
        train_dataset=[{"input_ids": document.tolist()} for document in documents_of(lengths)],
        callbacks=[] if fate is None else [fate],
    )
    if fate is not None:
        fate.trainer = trainer
    trainer.train()
    if trainer.pool is not None:
        trainer.pool.close()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def check_server(setting: Setting) -> Findings:
    """The same steps with a server that joins and is killed, and without one."""
    findings, warnings = Findings(), Warnings()
    logger = logging.getLogger("hf_distca")
    logger.addHandler(warnings)
    with tempfile.TemporaryDirectory() as folder:
        expected = train(setting, None, folder)
        token_file = Path(folder, "token")
        fate = Fate(token_file)
        try:
            losses = train(
                setting,
                fate,
                folder,
                attention_servers="external",
                attention_server_address=f"127.0.0.1:{free_port()}",
                attention_server_token_file=str(token_file),
                attention_server_timeout=TIMEOUT_S,
            )
        finally:
            fate.close()
            logger.removeHandler(warnings)
    findings.figures = {
        "servers": fate.served,
        "losses": losses,
        "losses_without": expected,
        "warnings": warnings.said,
    }
    wanted = [int(JOINS <= step <= KILLED) for step in range(STEPS)]
    findings.check(fate.served == wanted, f"so many servers took part: {fate.served}, {wanted} were expected")
    findings.check(
        any("computed by the ranks" in text for text in warnings.said),
        f"the server's last call was not computed by the trainer; it warned of {warnings.said}",
    )
    findings.check(len(losses) == len(expected) == STEPS, f"{len(losses)} losses were logged, expected {STEPS}")
    for number, (mine, theirs) in enumerate(zip(losses, expected, strict=False)):
        findings.at_most(
            abs(mine - theirs) / theirs, LOSS_BOUNDS[setting.dtype], f"difference of the loss of step {number}"
        )
    return findings
