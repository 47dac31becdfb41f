"""Ranks for tests: processes with a gloo group among them, started once and used by many tests."""

import gc
import io
import multiprocessing
import os
import pickle
import secrets
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

TIMEOUT_S = 90
POISON = 0x7F
"""Each byte of a row number that was never sent."""
EARLIER_NAMES = ".gradient_checkpointing"
"""Beginning of transformers' warnings of earlier names.

PEFT alone asks for `is_gradient_checkpointing`.
"""
PRELOADED = [
    *("torch", "transformers", "datasets", "deepspeed", "peft"),
    *("trl.trainer.dpo_trainer", "trl.trainer.grpo_trainer", "trl.trainer.sft_trainer"),
    *("hf_distca", "hf_distca.dispatch.dispatcher", "hf_distca.kernels.cpu"),
    *("hf_distca.pool.server", "hf_distca.trainer.trl.sft", "hf_distca.trainer.trl.preference"),
    *("transformers.models.llama.modeling_llama", "tests.models_and_batches"),
    *("tests.trainer.preferences", "tests.trainer.small_trainers"),
]


class RankPool:
    """`size` processes that have a default gloo group and run what they are given."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._connections: list[Connection] = []
        self._processes: list[Any] = []

    def run(
        self, function: Callable[..., Any], *args: Any, keeps_groups: bool = False
    ) -> list[Any]:
        """Call a module-level function with the arguments on every rank; what each returned, by
        rank.

        With `keeps_groups` the groups that it made stay until a later run ends them: torch gives
        the meshes of DTensors to later ones of the same shape, groups and all.
        """
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function, args, keeps_groups))
        try:
            return self._answers()
        except BaseException:  # an answer that comes later would be that of the next run
            self.close()
            raise

    def _answers(self) -> list[Any]:
        """Wait for what each rank returns, by rank."""
        results: dict[int, Any] = {}
        while len(results) < self.size:
            waiting = [
                connection
                for rank, connection in enumerate(self._connections)
                if rank not in results
            ]
            ready = wait(waiting, timeout=TIMEOUT_S)
            if not ready:
                raise TimeoutError(
                    f"only ranks {sorted(results)} of {self.size} answered in {TIMEOUT_S} s"
                )
            for connection in ready:
                rank = self._connections.index(connection)
                succeeded, results[rank] = _unpacked(connection.recv_bytes())
                if not succeeded:  # the others may wait for this rank forever
                    raise AssertionError(f"rank {rank}:\n{results[rank]}")
        return [results[rank] for rank in range(self.size)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        self._processes = []
        self._connections = []

    def _start(self) -> None:
        context = forkserver()
        port = free_port()
        for rank in range(self.size):
            own_end, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.size, port))
            process.start()
            theirs.close()  # so that a rank sees the end of the test process
            self._connections.append(own_end)
            self._processes.append(process)


def _serve(connection: Connection, rank: int, size: int, port: int) -> None:
    _become_rank(rank, size, port)
    import torch.distributed as dist

    dist.init_process_group("gloo")
    modules = 0
    while True:
        try:
            function, args, keeps_groups = connection.recv()
        except EOFError:
            return
        if len(sys.modules) > modules:
            # A collection looks through all that was imported, a quarter of a second long.
            gc.freeze()
            modules = len(sys.modules)
        try:
            result = function(*args)
            if (
                not keeps_groups
            ):  # the threads of one group poll, those of hundreds take a core and more
                dist.barrier()  # nothing is on its way in any of them
                gc.collect()
                for group in list(dist.distributed_c10d._world.pg_map):
                    if group is not dist.group.WORLD:
                        dist.destroy_process_group(group)
            connection.send_bytes(_packed((True, result)))
        except Exception:
            connection.send_bytes(_packed((False, traceback.format_exc())))


def _packed(result: Any) -> bytes:
    """Return the bytes of a result.

    A connection by itself would send each tensor as a shared file, which takes ten times as long.
    """
    import torch

    buffer = io.BytesIO()
    torch.save(result, buffer, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    return buffer.getvalue()


def _unpacked(content: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(content), weights_only=False)


@contextmanager
def own_processes(
    size: int, function: Callable[..., None], *args: Any, folder: Path
) -> Iterator[list[Any]]:
    """Processes of a world of their own, which may end as they like: they are killed where the
    block ends.

    Args:
        function: of a module, called with the arguments on every rank.
        folder: what a rank prints is in the file `output-RANK` there.
    """
    import torch.distributed as dist

    port = free_port()
    context = forkserver()
    # The store is the launcher's, as under torchrun: it outlives every rank.
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    given = size, port, folder, function, args
    ranks = [context.Process(target=_in_own_process, args=(rank, *given)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    try:
        yield ranks
    except AssertionError:
        for number in range(size):
            output = folder / f"output-{number}"
            print(f"{output}:\n{output.read_text(errors='replace') if output.exists() else ''}")
        raise
    finally:
        for rank in ranks:
            rank.kill()
        del store


def _in_own_process(
    rank: int,
    size: int,
    port: int,
    folder: Path,
    function: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # As in a terminal; what a shell starts in the background ignores it, and so would its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    _become_rank(rank, size, port)
    function(*args)


def _become_rank(rank: int, size: int, port: int) -> None:
    """Let this process be a rank of a new world, as a launcher would."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch

    poison_unsent_numbers()
    measure_briefly()
    warnings.filterwarnings("error", EARLIER_NAMES, FutureWarning)
    # As in a process that is launched: what a forkserver has made would make processes that import
    # everything anew.
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    with suppress(
        ImportError
    ):  # DeepSpeed would compile for half a minute an operator that only inference uses
        from deepspeed import ops
        from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

        ops.__compatible_ops__[ShareMemCommBuilder.NAME] = False


def forkserver() -> Any:
    """Makes processes that have imported what takes long."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def free_port() -> int:
    """A TCP port on the loopback interface that nobody listens to.

    It lies below those of outgoing connections (32768 to 60999): who tries to reach it before
    anybody listens could be given the very port, and connect to itself.
    """
    while True:
        port = 20000 + secrets.randbelow(12768)  # not from `random`, which trainers seed
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def poison_unsent_numbers() -> None:
    """Let index tensors on the CPU have no row numbers before their buffer is sent, as on a GPU.

    Numbers that were never sent are beyond all rows, so that reading by them fails.
    """
    import torch

    from hf_distca.dispatch import rows

    device_bytes = rows.device_bytes

    def poisoned(host_B: torch.Tensor, device: torch.device) -> torch.Tensor:
        if device.type != "cpu":
            return device_bytes(host_B, device)
        return torch.full_like(host_B, POISON)

    rows.device_bytes = poisoned


def measure_briefly() -> None:
    """Let trainings of this process measure their device by as few calls as the fit of costs needs.

    A training measures for most of a second, and most trainings of tests take less.
    """
    from hf_distca.profiling import costs, device

    costs.LIMIT_S, device.REPEATS = 0.0, 1


@contextmanager
def backward_in_a_thread() -> Iterator[None]:
    """Let every backward run in a thread of its own, as autograd has one for each CUDA device."""
    import torch

    backward = torch.Tensor.backward

    def in_a_thread(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(backward, tensor, *args, **options).result()

    with patch.object(torch.Tensor, "backward", in_a_thread):
        yield


def with_backward_in_a_thread(function: Callable[..., Any], *args: Any) -> Any:
    with backward_in_a_thread():
        return function(*args)
