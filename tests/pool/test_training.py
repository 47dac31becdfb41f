"""Training with attention servers, some of which fail at every moment: the parameters are those
without servers.

Ranks train a small model for some optimizer steps of two micro-batches each and evaluate it after
every step. Each rank sees a fault as training does: nobody tells it.
"""

import os
import re
from functools import cache
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.patches.layers import plan_layers
from hf_distca.plan.cost import Workers
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings
from hf_distca.pool.directory import Directory
from hf_distca.pool.nixl import is_installed
from hf_distca.pool.rank.pool import Pool
from hf_distca.pool.rank.speeds import OBSERVED, observe
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
    "document_layout": "joint",
    "keep_received": False,
    "ranks_serve": True,
    "learns": 0,  # speeds are learned for so many steps
    "comes_back": False,  # one more server joins after the faulty step
    "cut": False,  # rank 1 loses its links in the faulty step
}
TCP, NIXL = Choice.TCP, Choice.NIXL
TURNS = {"ping_pong": True}
GEMMA = {**TURNS, "model_type": "gemma2"}


def new_model(model_type, implementation="distca"):
    """A model and its optimizer, in float64: in float32 rounding alone comes to more than 1e-5 on
    some processors.
    """
    model = small_model(model_type, implementation, **CONFIGS[model_type]).double()
    return model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)


def targets_of(*batches):
    return sum(length - 1 for lengths in batches for length in lengths)


def trained(transport, port, folder, servers, moment, timeout_s, given):
    """Train with servers on every rank, as `given`; of servers the process, kind and place of the
    fault.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    config = CONFIGS[given.model_type]
    settings = PlanSettings(
        ranks,
        4096,
        small_kinds(
            *((24, None) if "sliding_window" in config else [None]),
            chunk=config.get("attention_chunk_size"),
        ),
        document_layout=given.document_layout,
        balance_block_size=8,
        ping_pong=given.ping_pong,
        # Of 8 rows: what ranks exchange travels in stages, and so do repairs.
        exchange_buffer_bytes=512,
    )
    dispatcher = Dispatcher(settings, CPU, keep_received=given.keep_received)
    directory = Directory("127.0.0.1", port, TOKEN) if rank == 0 else None
    log, serving = (
        Messages("hf_distca.pool"),
        {"ranks_serve": given.ranks_serve, "timeout_s": timeout_s},
    )
    with patch("hf_distca.pool.rank.pool.measure_speed", alike):
        pool = dispatcher.remote = Pool(
            dispatcher, TOKEN, directory, memory_of(transport), **serving
        )

    def reach(name):
        """If that is when the faults come, trigger them, and wait where they come by themselves."""
        if rank == 0 and name == moment:
            (folder / "trigger").touch()
            before = directory.members().keys()
            for pid, fault in servers:
                if fault is not None and fault[1] == "by itself":
                    os.kill(pid, SIGNALS[fault[0]])
                    wait_until(
                        lambda pid=pid: (
                            state_of(pid) in "TZX" or directory.members().keys() != before
                        )
                    )
        if ranks > 1:
            dist.barrier()

    def loss_of(lengths, total):
        plan = plan_micro_batch(lengths, settings)
        batch, bound = cut_rows(plan, rank, random_documents(lengths)), dispatcher.bind(plan)
        at_servers[-1] |= any(
            routes.servers for nano in bound.nano_batches for routes in nano.routes.values()
        )
        return model(
            **batch, labels=batch["shift_labels"], num_items_in_batch=total, distca_plan=bound
        ).loss

    if rank == 0:
        wait_until(lambda: len(directory.members()) == len(servers))
    reach("before joining")
    model, optimizer = new_model(given.model_type)
    if given.ping_pong:
        plan_layers(model)
    members, at_servers = [], []
    recording = dispatcher.recorder.listen(*OBSERVED)
    for step in range(STEPS):
        if step == given.learns:  # learned speeds may leave a server without tasks
            pool.speeds.workers = lambda *_, **__: Workers.uniform(ranks + len(pool.servers))
        if step == FAULTY_STEP:
            reach("between steps")
        if rank == 0 and given.comes_back and step == FAULTY_STEP + 1:
            (folder / "join").touch()
            wait_until(lambda: max(directory.members(), default=0) >= len(servers))
        pool.refresh()
        members.append(len(pool.servers))
        at_servers.append(False)
        if step == FAULTY_STEP:
            reach("in a step")
            if rank == 1 and given.cut:
                lose_in_a_call(*pool.links.values())
        for lengths in BATCHES[step]:
            recording.take()
            loss_of(lengths, targets_of(*BATCHES[step])).backward()
            observed = observe(recording.take())
        if ranks > 1:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        if step == FAULTY_STEP:
            reach("during evaluation")
        with torch.no_grad():
            evaluated = loss_of(EVALUATED, targets_of(EVALUATED))
        if ranks > 1:
            dist.all_reduce(evaluated)
    pool.close()
    log.end()
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return parameters, evaluated.item(), log.lines, members, at_servers, observed


def lose_in_a_call(link):
    """Lose a link in a call whose reply comes, so that the server misses nobody."""
    wait = link.wait

    def wait_and_lose(*args):
        wait(*args)
        link.fail("cut")
        raise LinkLost(link.lost)

    link.wait = wait_and_lose


@cache
def expected(model_type):
    """Parameters and evaluation of one process with transformers' own attention."""
    model, optimizer = new_model(model_type, "eager" if model_type == "gemma2" else "sdpa")
    for batches in BATCHES[:STEPS]:
        reference_step(
            model, [document for lengths in batches for document in random_documents(lengths)]
        )
        optimizer.step()
    evaluated = reference_step(model, random_documents(EVALUATED))[0]
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, evaluated


LEFT = r"lost attention server .*127\.0\.0\.1:.*1 servers left"
LOST = r"lost attention server .*127\.0\.0\.1:.*computed by the ranks; 1 servers left"
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
        (TCP, [None], "never", {"keep_received": True, "learns": STEPS - 1}, "111", []),
        (NIXL, [None], "never", GEMMA, "111", []),
        (TCP, [None], "never", {"model_type": "llama4_text"}, "111", []),
        (NIXL, [None], "never", {**TURNS, "ranks": 1}, "111", []),
        (TCP, [None], "never", {**TURNS, "model_type": "qwen3_next"}, "111", []),
        # Who was only cut off joins again; the others do not come back.
        (TCP, [("killed", "forward"), None], "in a step", GEMMA, "221", [LOST]),
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
    port, given, processes = free_port(), SimpleNamespace(**DEFAULTS | options), []

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
    if given.comes_back:
        start(None, tmp_path / "join")
    # A server that is killed or cut off is noticed at once; 600 s are longer than the ranks have
    # time.
    timeout_s = 2 if any(fault and fault[0] == "hung" for fault in faults) else 600
    results = rank_pools[given.ranks].run(
        trained, transport, port, tmp_path, servers, moment, timeout_s, given
    )
    wanted, wanted_evaluated = expected(given.model_type)
    _, _, log, counts, at_servers, _ = results[0]
    assert re.fullmatch(members, "".join(map(str, counts)))
    for parameters, evaluated, _, others_counts, _, _ in results:
        assert evaluated == pytest.approx(wanted_evaluated, rel=1e-5)
        assert counts == others_counts
        for name, parameter in wanted.items():
            assert relative_error(parameters[name], parameter) < 1e-5, name
    assert at_servers[given.learns :] == list(map(bool, counts))[given.learns :]
    warned = [line for line in log if line.startswith("WARNING")]
    assert warnings is None or len(warned) == len(warnings)
    assert all(map(re.search, warnings or [], warned)), warned
    carried = [line.partition("rows travel over ")[2] for line in log if "takes part" in line]
    assert all(name.startswith(transport.upper()) for name in carried)
    if given.comes_back:
        assert any(
            line.startswith("INFO attention server 1 ") and "takes part" in line for line in log
        )
    seen = [observed for *_, observed in results]
    if counts[-1] == 0:
        assert all(rank.servers == {} for rank in seen)
    if warnings != []:
        return
    for process in processes:  # servers were told that training ended
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * len(processes)
    if given.model_type == "llama" and given.ranks == 2:
        assert all(
            rank.calls == (ATTENTIONS * 2 if given.ping_pong else ATTENTIONS) for rank in seen
        )
        assert all((rank.pairs > 0) == (rank.seconds > 0) == given.ranks_serve for rank in seen)
        assert any(rank.servers for rank in seen)
