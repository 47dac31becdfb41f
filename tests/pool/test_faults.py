"""Servers that fail at every moment of a training: the parameters are those of a training that never had any.

Two ranks train a small model for some optimizer steps of two micro-batches each, evaluate it after every step and save
it after every second one. Each rank sees the fault as training does: nobody tells it.
"""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.patches.layers import plan_layers
from hf_distca.planner.cost import Workers
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings
from hf_distca.pool.directory import Directory
from hf_distca.pool.memory import Choice
from hf_distca.pool.rank.pool import use_servers
from tests.dispatch.test_equality import cut_rows
from tests.logged import Messages
from tests.models_and_batches import random_documents, reference_step, relative_error, small_kinds, small_model
from tests.pool.servers import TOKEN, Fault, ServerProcess, alike, wait_until
from tests.pool.transport.ends import TRANSPORTS, memory_of
from tests.ranks import free_port

STEPS = 4
FAULTY_STEP = 1
"""Faults come in the second optimizer step, or right before or after it."""
BATCHES = [[[120, 7, 1, 33, 64, 90], [50, 81, 40, 19]], [[30, 31, 99, 2, 96], [77, 76, 75]]] * 2
EVALUATED = [61, 20, 18, 45]

LLAMA: dict[str, Any] = {"model_type": "llama", "windows": (None,)}
GEMMA: dict[str, Any] = {
    "model_type": "gemma2",
    "windows": (24, None),
    "config": {"sliding_window": 24, "query_pre_attn_scalar": 8},
}


def new_model(kind: dict[str, Any], implementation: str = "distca") -> PreTrainedModel:
    """In float64: in float32, rounding alone comes to more than 1e-5 in these steps on some processors."""
    return small_model(kind["model_type"], implementation, **kind.get("config", {})).double()


def new_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)


def parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def targets_of(documents: Sequence[Tensor]) -> int:
    return sum(len(document) - 1 for document in documents)


def trained(port: int, servers: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train with servers on every rank; `options["moment"]` says when the faults are triggered."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    faults: list[Fault] = options["faults"]
    kinds = small_kinds(*options["windows"])
    settings = PlanSettings(
        ranks,
        4096,
        kinds,
        balance_block_size=8,
        ping_pong=options.get("ping_pong", False),
        exchange_buffer_bytes=512,  # of 8 rows: what ranks exchange travels in stages, and so do repairs
    )
    dispatcher = Dispatcher(settings, torch.device("cpu"))
    directory = Directory("127.0.0.1", port, TOKEN) if rank == 0 else None
    log = Messages("hf_distca.pool")
    with patch("hf_distca.pool.rank.pool.measure_speed", alike):
        pool = use_servers(
            dispatcher,
            TOKEN,
            directory,
            memory_of(options["transport"], "rank"),
            ranks_serve=options.get("ranks_serve", True),
            timeout_s=options["timeout_s"],
        )
    # Measured speeds and ways may leave a server without tasks, where no fault would strike it.
    pool.workers = lambda nano_batches: Workers.uniform(ranks + len(pool.servers))

    def moment(name: str) -> None:
        """If that is when the faults come, trigger them, and wait where they come by themselves."""
        if rank == 0 and name == options["moment"]:
            for fault in faults:
                fault.trigger.touch()
                if fault.where == "by itself":
                    wait_until(fault.has_struck)
        dist.barrier()

    if directory is not None:
        wait_until(lambda: len(directory.members()) == servers)
    moment("before joining")
    model = new_model(options)
    if settings.ping_pong:
        plan_layers(model)
    optimizer = new_optimizer(model)
    members, at_servers = [], []

    def loss_of(lengths: list[int], total: int) -> Tensor:
        plan = plan_micro_batch(lengths, settings)
        batch = cut_rows(plan, rank, random_documents(lengths))
        bound = dispatcher.bind(plan)
        at_servers[-1] += sum(bool(routes.servers) for nano in bound.nano_batches for routes in nano.routes.values())
        return model(**batch, labels=batch["shift_labels"], num_items_in_batch=total, distca_plan=bound).loss

    for step in range(STEPS):
        if step == FAULTY_STEP:
            moment("between steps")
        if rank == 0 and step == options.get("join_step"):
            options["join_when"].touch()
            wait_until(lambda: any(member.id >= servers for member in directory.members()))
        pool.refresh()
        members.append(len(pool.servers))
        at_servers.append(0)
        if step == FAULTY_STEP:
            moment("in a step")
        total = sum(targets_of(random_documents(lengths)) for lengths in BATCHES[step])
        for lengths in BATCHES[step]:
            loss_of(lengths, total).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        if step == FAULTY_STEP:
            moment("during evaluation")
        with torch.no_grad():
            evaluated = loss_of(EVALUATED, targets_of(random_documents(EVALUATED)))
        dist.all_reduce(evaluated)
        if step % 2 == 1:
            if rank == 0:
                torch.save(model.state_dict(), io.BytesIO())
            if step == FAULTY_STEP:
                moment("during saving")
            dist.barrier()
    pool.close()
    log.end()
    return {
        "parameters": parameters(model),
        "evaluated": evaluated.item(),
        "log": log.lines,
        "members": members,
        "at_servers": at_servers,
    }


_EXPECTED: dict[str, tuple[dict[str, Tensor], float]] = {}


def expected(kind: dict[str, Any]) -> tuple[dict[str, Tensor], float]:
    """Parameters and evaluation of one process with transformers' own attention."""
    name = kind["model_type"]
    if name not in _EXPECTED:
        model = new_model(kind, "eager" if name == "gemma2" else "sdpa")
        optimizer = new_optimizer(model)
        for batches in BATCHES:
            documents = [random_documents(lengths) for lengths in batches]
            total = sum(map(targets_of, documents))
            grads: dict[str, Tensor] = {}
            for micro_batch in documents:
                _, got = reference_step(model, micro_batch)
                for parameter, grad in got.items():
                    share = grad * targets_of(micro_batch) / total
                    grads[parameter] = grads[parameter] + share if parameter in grads else share
            for parameter, value in model.named_parameters():
                value.grad = grads[parameter]
            optimizer.step()
        _EXPECTED[name] = parameters(model), reference_step(model, random_documents(EVALUATED))[0]
    return _EXPECTED[name]


class Run:
    """A training with servers some of which fail, and what is left of them ended.

    Args:
        rank_pools: the test session's ranks.
        folder: for triggers.
        transport: what carries rows.
    """

    def __init__(self, rank_pools: Any, folder: Path, transport: Choice) -> None:
        self._ranks = rank_pools[2]
        self._folder = folder
        self._transport = transport
        self.servers: list[ServerProcess] = []

    def __call__(
        self,
        faults: Sequence[tuple[str, str] | None],
        moment: str,
        options: dict[str, Any],
        *,
        join_step: int | None = None,
    ) -> dict[str, Any]:
        """Train, and check that parameters and evaluation are what they would be without servers.

        Args:
            faults: of each server, its kind and where; None for a server that works.
            moment: when they are triggered.
            options: of the training.
            join_step: step before which one more server joins.
        """
        port, join_when = free_port(), self._folder / "join"
        made = [fault and Fault(*fault, self._folder / f"trigger{number}") for number, fault in enumerate(faults)]
        self.servers += [ServerProcess(port, fault, transport=self._transport) for fault in made]
        if join_step is not None:
            self.servers.append(ServerProcess(port, None, join_when, self._transport))
        hung = any(fault and fault[0] == "hung" for fault in faults)
        given = {
            **options,
            "transport": self._transport,
            "faults": [fault for fault in made if fault],
            "moment": moment,
            # A server that is killed or cut off is noticed at once: its timeout is longer than the ranks have time.
            "timeout_s": 1 if hung else 600,
            "join_step": join_step,
            "join_when": join_when,
        }
        results = self._ranks.run(trained, port, len(made), given)
        after, evaluated = expected(options)
        before = new_model(options)
        for result in results:
            assert result["evaluated"] == pytest.approx(evaluated, rel=1e-5)
            assert result["members"] == results[0]["members"]
            for name, parameter in before.named_parameters():
                assert relative_error(result["parameters"][name], after[name]) < 1e-5, name
                assert relative_error(parameter, after[name]) > 5e-4, name
        carried = [line.partition("rows travel over ")[2] for line in results[0]["log"] if "takes part" in line]
        assert all(name.startswith(self._transport.upper()) for name in carried)
        return results[0]


@pytest.fixture(params=TRANSPORTS)
def run(request, rank_pools, tmp_path) -> Iterator[Run]:
    training = Run(rank_pools, tmp_path, request.param)
    yield training
    for server in training.servers:
        server.close()


def warnings(result: dict[str, Any]) -> list[str]:
    return [line for line in result["log"] if line.startswith("WARNING")]


KINDS = ["killed", "hung", "cut off"]
IN_A_CALL = [
    ("in forward", "in a step", "forward", {**GEMMA, "ping_pong": True}),
    ("in backward", "in a step", "backward", {**LLAMA, "ranks_serve": False, "ping_pong": True}),
    ("during evaluation", "during evaluation", "forward", LLAMA),
]


def test_without_faults(run):
    result = run([None, None], "never", {**LLAMA, "ping_pong": True})
    assert result["members"] == [2] * STEPS
    assert all(result["at_servers"])
    assert warnings(result) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("moment", "where", "options"), [case[1:] for case in IN_A_CALL], ids=[c[0] for c in IN_A_CALL]
)
def test_in_a_call(run, kind, moment, where, options):
    result = run([(kind, where), None], moment, options)
    assert result["members"][FAULTY_STEP] == 2
    (warning,) = warnings(result)
    assert "lost attention server" in warning
    assert "127.0.0.1:" in warning
    assert "computed by the ranks" in warning
    assert "1 servers left" in warning
    # Who was only cut off joins again; the others do not come back.
    assert result["members"][-1] == 1 or kind == "cut off"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", ["between steps", "during saving"])
def test_outside_of_calls(run, kind, moment):
    result = run([(kind, "by itself"), None], moment, {**LLAMA, "ping_pong": True})
    (warning,) = warnings(result)
    assert "lost attention server" in warning
    if kind == "hung":  # that shows in the next call only
        assert "computed by the ranks" in warning
    assert result["members"][-1] == 1 or kind == "cut off"


@pytest.mark.parametrize("kind", KINDS)
def test_before_joining(run, kind):
    # The directory knows the servers, no trainer is connected to them.
    result = run([(kind, "by itself"), None], "before joining", LLAMA)
    assert result["members"][0] == 1 or kind == "cut off"
    if kind == "hung":
        assert "cannot take part" in warnings(result)[0]


@pytest.mark.parametrize("kind", ["killed", "hung"])
def test_all_servers_lost(run, kind):
    result = run([(kind, "forward"), (kind, "backward")], "in a step", LLAMA)
    first, second = warnings(result)
    assert "1 servers left" in first
    assert "no server left, so ranks compute all tasks" in second
    assert result["members"] == [2, 2, 0, 0]
    assert result["at_servers"][2:] == [0, 0]


def test_server_that_comes_back_takes_part_from_the_next_step(run):
    result = run([("killed", "forward")], "in a step", {**LLAMA, "ping_pong": True}, join_step=FAULTY_STEP + 1)
    assert result["members"] == [1, 1, 1, 1]
    assert all(result["at_servers"])
    assert "no server left" in warnings(result)[0]
    assert any(line.startswith("INFO attention server 1 ") and "takes part" in line for line in result["log"])
