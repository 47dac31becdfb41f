"""Training with attention servers, some of which fail at every moment: the parameters are those
without servers.

Ranks train a small model for some optimizer steps of two micro-batches each and evaluate it after
every step. Each rank sees a fault as training does: nobody tells it.
"""

import os
import re
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.patches.layers import plan_layers
from hf_distca.patches.targets import repeat_target_rows
from hf_distca.plan import PLAN_KEY
from hf_distca.plan.cost import Workers
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings
from hf_distca.pool.directory import Directory
from hf_distca.pool.nixl import is_installed
from hf_distca.pool.rank.pool import Pool
from hf_distca.pool.rank.speeds import OBSERVED, Observed, observe
from hf_distca.pool.transport import Choice
from hf_distca.pool.wire import LinkLost
from tests.logged import Messages
from tests.models_and_batches import (
    SMALL_HYBRID,
    SMALL_LLAMA4,
    cut_rows,
    random_documents,
    reference_step,
    relative_error,
    small_kinds,
    small_model,
)
from tests.pool.ends import CPU, SIGNALS, TOKEN, alike, memory_of, serve, state_of, wait_until
from tests.ranks import forkserver, free_port
from tests.shared_documents import (
    shared_batch,
    step_without_sharing,
    targets_of,
    with_equal_prefixes,
)

pytestmark = pytest.mark.usefixtures("backward_thread")

STEPS = 3
FAULTY_STEP = 1
"""Faults come in the second optimizer step, or right before or after it."""
BATCHES = [[[120, 7, 1, 33, 64, 90], [50, 81, 40, 19]], [[30, 31, 99, 2, 96], [77, 76, 75]]] * 2
EVALUATED = [61, 20, 18, 45]
ATTENTIONS = 4
"""Of a micro-batch: two layers, forward and backward."""
CONFIGS = {
    "llama": {},
    "gemma2": {"sliding_window": 24, "query_pre_attn_scalar": 8},
    "llama4_text": SMALL_LLAMA4,
    # Without experts, which torch does not compute in float64.
    "qwen3_next": {**SMALL_HYBRID, "mlp_only_layers": [0, 1]},
}
DEFAULTS = {
    "model_type": "llama",
    "ranks": 2,
    "ping_pong": False,
    "document_layout": "auto",
    "ranks_serve": True,
    "shares": False,  # documents have equal prefixes and share rows
    "learns": 0,  # speeds are learned for so many steps
    "comes_back": False,  # one more server joins after the faulty step
    "cut": False,  # rank 1 loses its links in the faulty step
}
TCP = Choice.TCP
NIXL = Choice.NIXL
SHARES = {"shares": True}
TURNS = {"ping_pong": True}
GEMMA = {**TURNS, "model_type": "gemma2"}


def new_model(model_type, implementation="distca"):
    """A model and its optimizer, in float64: in float32 rounding alone comes to more than 1e-5 on
    some processors.
    """
    model = small_model(model_type, implementation, **CONFIGS[model_type]).double()
    return model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)


def documents_of(*batches):
    """Documents with equal prefixes, of all these micro-batches."""
    return [document for lengths in batches for document in with_equal_prefixes(lengths)]


def targets_in(options, *batches):
    if options.shares:
        return targets_of(documents_of(*batches))
    return sum(length - 1 for lengths in batches for length in lengths)


class Trained(NamedTuple):
    """What a rank has seen and learned."""

    parameters: dict[str, torch.Tensor]
    evaluated: float
    log: list[str]
    members: list[int]
    """Servers in use, by step."""
    at_servers: list[bool]
    """Whether servers computed a task, by step."""
    observed: Observed
    """Of the last micro-batch."""


def trained(*args):
    """Train with servers on every rank; see `TrainingRank`."""
    return TrainingRank(*args).run()


class TrainingRank:
    """A rank that trains with servers, as `options` say; rank 0 triggers their faults.

    Args:
        servers: the process of each server, and the kind and place of its fault.
        moment: when faults come.
    """

    def __init__(self, transport, port, folder, servers, moment, timeout_s, options):
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()
        self.folder = folder
        self.servers = servers
        self.moment = moment
        self.options = options
        self.members = []
        self.at_servers = []
        self.settings = settings_of(options, self.ranks)
        self.dispatcher = Dispatcher(self.settings, CPU)
        self.directory = Directory("127.0.0.1", port, TOKEN) if self.rank == 0 else None
        self.log = Messages("hf_distca.pool")
        memory = memory_of(transport)
        serving = {"ranks_serve": options.ranks_serve, "timeout_s": timeout_s}
        with patch("hf_distca.pool.rank.pool.measure_speed", alike):
            self.pool = Pool(self.dispatcher, TOKEN, self.directory, memory, **serving)
        self.dispatcher.remote = self.pool

    def run(self):
        if self.rank == 0:
            wait_until(lambda: len(self.directory.members()) == len(self.servers))
        self.reach("before joining")
        self.model, self.optimizer = new_model(self.options.model_type)
        if self.options.ping_pong:
            plan_layers(self.model)
        if self.options.shares:
            repeat_target_rows(self.model)
        self.recording = self.dispatcher.recorder.listen(*OBSERVED)
        for step in range(STEPS):
            self.prepare(step)
            observed = self.train(BATCHES[step])
            if step == FAULTY_STEP:
                self.reach("during evaluation")
            evaluated = self.evaluate()
        self.pool.close()
        self.log.end()
        parameters = {
            name: parameter.detach().clone() for name, parameter in self.model.named_parameters()
        }
        return Trained(
            parameters, evaluated, self.log.lines, self.members, self.at_servers, observed
        )

    def prepare(self, step):
        """Let servers join and leave before a step, and faults come where it is their moment."""
        if step == self.options.learns:  # learned speeds may leave a server without tasks
            self.pool.speeds.workers = self.alike_workers
        if step == FAULTY_STEP:
            self.reach("between steps")
        if self.rank == 0 and self.options.comes_back and step == FAULTY_STEP + 1:
            (self.folder / "join").touch()
            wait_until(lambda: max(self.directory.members(), default=0) >= len(self.servers))
        self.pool.refresh()
        self.members.append(len(self.pool.servers))
        self.at_servers.append(False)
        if step == FAULTY_STEP:
            self.reach("in a step")
            if self.rank == 1 and self.options.cut:
                lose_in_a_call(*self.pool.links.values())

    def alike_workers(self, *_, **__):
        return Workers.uniform(self.ranks + len(self.pool.servers))

    def reach(self, moment):
        """Trigger the faults if they come at this moment, and wait for those that come by
        themselves.
        """
        if self.rank == 0 and moment == self.moment:
            (self.folder / "trigger").touch()
            members = self.directory.members().keys()
            for pid, fault in self.servers:
                if fault is not None and fault[1] == "by itself":
                    os.kill(pid, SIGNALS[fault[0]])
                    self.wait_until_stopped_or_left(pid, members)
        if self.ranks > 1:
            dist.barrier()

    def wait_until_stopped_or_left(self, pid, members):
        wait_until(lambda: state_of(pid) in "TZX" or self.directory.members().keys() != members)

    def train(self, batches):
        """Train a step of micro-batches; what was observed in the last one."""
        for lengths in batches:
            self.recording.take()
            self.loss_of(lengths, targets_in(self.options, *batches)).backward()
            observed = observe(self.recording.take())
        if self.ranks > 1:
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return observed

    def evaluate(self):
        with torch.no_grad():
            loss = self.loss_of(EVALUATED, targets_in(self.options, EVALUATED))
        if self.ranks > 1:
            dist.all_reduce(loss)
        return loss.item()

    def loss_of(self, lengths, targets):
        """This rank's share of the mean loss over so many targets."""
        if self.options.shares:
            batch = shared_batch(with_equal_prefixes(lengths), self.dispatcher)
        else:
            plan = plan_micro_batch(lengths, self.settings)
            batch = cut_rows(plan, self.rank, random_documents(lengths))
            batch |= {"labels": batch["shift_labels"], PLAN_KEY: self.dispatcher.bind(plan)}
        self.at_servers[-1] |= any(
            routes.remote
            for nano in batch[PLAN_KEY].nano_batches
            for routes in nano.routes.values()
        )
        return self.model(**batch, num_items_in_batch=targets).loss


def settings_of(options, ranks):
    config = CONFIGS[options.model_type]
    windows = (24, None) if "sliding_window" in config else (None,)
    return PlanSettings(
        ranks,
        4096,
        small_kinds(*windows, chunk=config.get("attention_chunk_size")),
        document_layout=options.document_layout,
        balance_block_size=8,
        ping_pong=options.ping_pong,
        # Of 8 rows: what ranks exchange travels in stages, and so do repairs.
        exchange_buffer_bytes=512,
    )


def lose_in_a_call(link):
    """Lose a link in a call whose reply comes, so that the server misses nobody."""
    wait = link.wait

    def wait_and_lose(*args):
        wait(*args)
        link.fail("cut")
        raise LinkLost(link.lost)

    link.wait = wait_and_lose


@cache
def expected(model_type, shares):
    """Parameters and evaluation of one process with transformers' own attention."""
    model, optimizer = new_model(model_type, "eager" if model_type == "gemma2" else "sdpa")

    def step(*batches):
        if shares:
            return step_without_sharing(model, documents_of(*batches))
        documents = [document for lengths in batches for document in random_documents(lengths)]
        return reference_step(model, documents)

    for batches in BATCHES[:STEPS]:
        step(*batches)
        optimizer.step()
    evaluated, _ = step(EVALUATED)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, evaluated


LEFT = r"lost attention server .*127\.0\.0\.1:.*1 server left"
LOST = r"lost attention server .*127\.0\.0\.1:.*computed by the ranks; 1 server left"
ALL_LOST = [LOST, "no server left, so ranks compute all tasks"]
# Packed in order, documents lie on both ranks, which cannot do without each other in a repair.
PACKED = {"document_layout": "fixed"}
NO_RANKS = {**TURNS, "ranks_serve": False}


@pytest.mark.parametrize(
    ("transport", "faults", "moment", "options", "members", "warnings"),
    [
        (TCP, [None, None], "never", {}, "222", []),
        (NIXL, [None, None], "never", TURNS, "222", []),
        (TCP, [None], "never", NO_RANKS, "111", []),
        (TCP, [None], "never", {"learns": STEPS - 1}, "111", []),
        (NIXL, [None], "never", GEMMA, "111", []),
        (TCP, [None], "never", {"model_type": "llama4_text"}, "111", []),
        (NIXL, [None], "never", {**TURNS, "ranks": 1}, "111", []),
        (TCP, [None], "never", {**TURNS, "model_type": "qwen3_next"}, "111", []),
        (NIXL, [None, None], "never", SHARES, "222", []),
        (TCP, [None], "never", {**GEMMA, **SHARES, "ranks_serve": False}, "111", []),
        (TCP, [None], "never", {**SHARES, "model_type": "llama4_text"}, "111", []),
        # Who was only cut off joins again; the others do not come back.
        (TCP, [("killed", "forward"), None], "in a step", GEMMA, "221", [LOST]),
        (TCP, [("killed", "forward"), None], "in a step", {**GEMMA, **SHARES}, "221", [LOST]),
        (NIXL, [("killed", "backward"), None], "in a step", {**PACKED, **SHARES}, "221", [LOST]),
        (TCP, [("hung", "forward"), None], "in a step", GEMMA, "221", [LOST]),
        (TCP, [("cut off", "backward"), None], "in a step", NO_RANKS, "22[12]", [LOST]),
        (TCP, [("killed", "forward"), None], "during evaluation", {}, "221", [LOST]),
        # What hangs between steps shows in the next call only.
        (TCP, [("hung", "by itself"), None], "between steps", TURNS, "221", [LOST]),
        (TCP, [("cut off", "by itself"), None], "between steps", TURNS, "2[12][12]", [LEFT]),
        # The directory knows the servers, no rank is connected to them.
        (TCP, [("killed", "by itself"), None], "before joining", {}, "111", None),
        (NIXL, [("killed", "backward"), None], "in a step", NO_RANKS, "221", [LOST]),
        (NIXL, [("cut off", "forward"), None], "in a step", GEMMA, "22[12]", [LOST]),
        (NIXL, [("hung", "backward"), None], "in a step", NO_RANKS, "221", [LOST]),
        (NIXL, [("killed", "by itself"), None], "between steps", TURNS, "2[12]1", [LEFT]),
        (NIXL, [("hung", "by itself"), None], "before joining", {}, "111", ["cannot take part"]),
        (
            TCP,
            [("killed", "forward"), ("killed", "backward")],
            "in a step",
            PACKED,
            "220",
            ALL_LOST,
        ),
        (NIXL, [("hung", "forward"), ("hung", "backward")], "in a step", PACKED, "220", ALL_LOST),
        (
            NIXL,
            [("killed", "forward")],
            "in a step",
            {**TURNS, "comes_back": True},
            "111",
            ["no server left"],
        ),
        # A server that one rank loses is lost to all.
        (
            TCP,
            [None],
            "never",
            {**PACKED, "cut": True},
            "11[01]",
            ["another rank lost it.: its tasks of this"],
        ),
    ],
)
def test_training_is_that_without_servers(
    rank_pools, tmp_path, request, transport, faults, moment, options, members, warnings
):
    if transport == NIXL and not is_installed():
        pytest.skip("needs nixl-cu12 or nixl-cu13")
    training = SimpleNamespace(**DEFAULTS | options)
    port = free_port()
    processes = []

    def start(fault, join_when=None):
        process = forkserver().Process(
            target=serve, args=(port, transport, fault, join_when), daemon=True
        )
        process.start()
        processes.append(process)
        request.addfinalizer(process.kill)

    for fault in faults:
        in_a_call = fault is not None and fault[1] != "by itself"
        start((*fault, tmp_path / "trigger") if in_a_call else None)
    servers = [(process.pid, fault) for process, fault in zip(processes, faults, strict=True)]
    if training.comes_back:
        start(None, tmp_path / "join")
    # A server that is killed or cut off is noticed at once; 600 s are longer than the ranks have
    # time.
    timeout_s = 2 if any(fault and fault[0] == "hung" for fault in faults) else 600
    results = rank_pools[training.ranks].run(
        trained, transport, port, tmp_path, servers, moment, timeout_s, training
    )
    assert_equals_training_without_servers(results, training)
    counts = results[0].members
    assert re.fullmatch(members, "".join(map(str, counts)))
    assert [result.members for result in results] == [counts] * len(results)
    at_servers = results[0].at_servers
    assert at_servers[training.learns :] == [count > 0 for count in counts][training.learns :]
    assert_warnings(results[0].log, warnings)
    joined = [line for line in results[0].log if "takes part" in line]
    carried_by = [line.partition("rows travel over ")[2] for line in joined]
    assert [name for name in carried_by if not name.startswith(transport.upper())] == []
    if training.comes_back:
        assert any(line.startswith("INFO attention server 1 ") for line in joined)
    if counts[-1] == 0:
        assert [result.observed.servers for result in results] == [{}] * len(results)
    if warnings != []:
        return
    for process in processes:  # servers were told that training ended
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * len(processes)
    if training.model_type == "llama" and training.ranks == 2:
        assert_observed([result.observed for result in results], training)


def assert_equals_training_without_servers(results, training):
    expected_parameters, expected_loss = expected(training.model_type, training.shares)
    for result in results:
        assert result.evaluated == pytest.approx(expected_loss, rel=1e-5)
        for name, parameter in expected_parameters.items():
            assert relative_error(result.parameters[name], parameter) < 1e-5, name


def assert_warnings(log, patterns):
    """Each warning of a log is that of its pattern; None: it may have any."""
    if patterns is None:
        return
    warned = [line for line in log if line.startswith("WARNING")]
    assert len(warned) == len(patterns), warned
    for pattern, line in zip(patterns, warned, strict=True):
        assert re.search(pattern, line)


def assert_observed(observed, training):
    """Calls of every rank were seen, and kernel calls where ranks compute tasks at all."""
    calls = ATTENTIONS * 2 if training.ping_pong else ATTENTIONS
    for figures in observed:
        assert figures.calls == calls
        assert (figures.pairs > 0) == training.ranks_serve
        assert (figures.seconds > 0) == training.ranks_serve
    assert any(figures.servers for figures in observed)
