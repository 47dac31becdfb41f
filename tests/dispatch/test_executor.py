"""The executor does what a schedule says and nothing else."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from hf_distca.dispatch.bound import Runtime
from hf_distca.dispatch.exchange import Route
from hf_distca.dispatch.executor import CoreAttention, Pass
from hf_distca.dispatch.recorder import Recorder
from hf_distca.kernels import AttentionParams, TaskShapes
from hf_distca.plan import AttentionKind
from hf_distca.planner.schedule import Kept, KernelCall, Phase, Transfer

CPU = torch.device("cpu")
KIND = AttentionKind(None, q_heads=2, kv_heads=1, dim_qk=8, dim_v=8)
PARAMS = AttentionParams(scale=0.5)
OWN = KernelCall("local", "local", "local")
VISITING = KernelCall("remote-query", "received", "received")
PREFIX = KernelCall("remote-KV", "local", "received", causal=False, first=False)
Q, KV = Transfer("queries", ("q",)), Transfer("keys", ("k", "v"))
RESULTS = Transfer("queries", ("o", "lse"), back=True)
ROUTE = Route([2], [2], True, slice(0, 2), forwarded=Route([1], [1], True, slice(1, 2)))


class Recorded:
    """An exchange of a rank with itself and a kernel of sums, which write down what they are asked for."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.memory: dict[str, list[Tensor]] = {}

    def buffer(self, slot, route, like) -> "RecordedBuffer":
        rows, number, nano_batch, repairs = slot
        assert (nano_batch, repairs, route) == (1, False, ROUTE)
        return RecordedBuffer(self, f"{rows} {{}}{number}")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, shapes: TaskShapes, params: AttentionParams):
        assert not torch.is_autocast_enabled("cpu")
        self.events.append(f"run {shapes.q_lens[0]} {'causal' if params.causal else 'full'}")
        return q + k.sum(), q.sum(-1)


class RecordedBuffer:
    """A buffer of the rank that exchanges rows with itself; it is the other rank of its node too."""

    under_way = True

    def __init__(self, recorded: Recorded, name: str) -> None:
        self.recorded, self.name = recorded, name

    def send(self, columns, rows) -> None:
        self._start("", columns)
        self.arriving = [column[rows].clone() for column in columns]
        self.recorded.memory[self.name] = self.arriving

    def return_received(self, columns) -> None:
        self._start("back ", columns)
        self.arriving = [column.clone() for column in columns]

    def forward(self, rows) -> None:
        """What is forwarded comes behind what has been received."""
        received = self.recorded.memory[self.name]
        self._start("forwarded ", received)
        self.arriving = self.recorded.forwarded = [torch.cat([column, column[rows]]) for column in received]

    def _start(self, way: str, columns) -> None:
        self.what = self.name.format(way)
        self.recorded.events.append(f"send {self.what} ({len(columns)})")

    def wait(self) -> list[Tensor]:
        self.recorded.events.append(f"wait {self.what}")
        return self.arriving


def attention_of(
    recorded: Recorded, schedule: tuple[Phase, ...], groups: dict, *, forwards: bool = False, kept: Kept = "nothing"
) -> CoreAttention:
    routes = SimpleNamespace(
        forward=schedule,
        groups=groups,
        queries=ROUTE,
        rows={"local": 3, "received": 2},
        keys=[ROUTE] * 7,
        slots=(0, 1, 2, 3, 4, 0, 1),
        merges=False,
        forwards=forwards,
        servers=(),
    )
    nano = SimpleNamespace(index=1, routes={KIND: routes})
    runtime = Runtime(CPU, recorded, recorded, Recorder(CPU))
    return CoreAttention(runtime, nano, KIND, PARAMS, layer=5, kept=kept)


def group(rows: int, keys: int | None = None) -> SimpleNamespace:
    """A group of one task on the first rows of a place."""
    keys = keys or rows
    shapes = TaskShapes.build([rows], [keys], CPU)
    return SimpleNamespace(shapes=shapes, q_rows=slice(0, rows), k_rows=slice(0, keys), pairs=10 * rows)


def test_a_schedule_written_by_hand_is_carried_out_phase_by_phase():
    recorded = Recorded()
    late_keys = Transfer("keys", ("k", "v"), stage=1)
    schedule = (
        Phase(send=(KV, Q)),
        Phase(run=(OWN,), send=(late_keys,), pause=True),
        Phase(wait=(Q, KV), run=(VISITING, PREFIX), send=(RESULTS,)),
        Phase(wait=(late_keys,), pause=True),
        Phase(wait=(RESULTS,)),
    )

    attention = attention_of(
        recorded, schedule, {("local", 0): group(3), ("remote-query", 0): group(2), ("remote-KV", 0): group(1)}
    )
    spans = attention.runtime.recorder.listen("phase", "kernel", "wait")
    passed = Pass(attention, "forward", (torch.ones(3, 2, 8), torch.ones(3, 1, 8), torch.ones(3, 1, 8)), {})
    ends = []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            passed.go_on()
        ends.append(len(recorded.events))
    assert recorded.events == [
        *["send keys 0 (2)", "send queries 0 (1)", "run 3 causal", "send keys 1 (2)"],
        *["wait queries 0", "wait keys 0", "run 2 causal", "run 1 full", "send queries back 0 (2)", "wait keys 1"],
        "wait queries back 0",
    ]
    assert ends == [4, 10, 11]
    found = [(span.kind, span.part, span.pairs) for span in spans.take() if span.work == (5, 1, "forward")]
    assert [part for kind, part, _ in found if kind == "phase"] == [
        "send k v, q",
        "run local; send k v [1]",
        "wait q, k v; run remote-query, remote-KV; send o lse",
        "wait k v [1]",
        "wait o lse",
    ]
    assert [(part, pairs) for kind, part, pairs in found if kind == "kernel"] == [
        ("local", 30),
        ("remote-query", 20),
        ("remote-KV", 10),
    ]
    assert [part for kind, part, _ in found if kind == "wait"] == ["q", "k v", "k v [1]", "o lse"]


@pytest.mark.parametrize("kept", ["nothing", "received"])
def test_keys_are_forwarded_when_they_have_come_and_read_when_all_are_there(kept):
    recorded = Recorded()
    keys = replace(KV, stage=6)  # in the memory of stage 1: five stages are in use at once
    forwarded = replace(keys, rows="forwarded")
    schedule = (
        Phase(send=(Q, keys), pause=True),
        Phase(wait=(keys,), send=(forwarded,)),
        Phase(wait=(Q, forwarded), run=(replace(VISITING, stage=6),), send=(RESULTS,), pause=True),
        Phase(wait=(RESULTS,)),
    )
    attention = attention_of(recorded, schedule, {("remote-query", 6): group(2, keys=3)}, forwards=True, kept=kept)
    k_TGD = torch.tensor([1.0, 2.0, 5.0])[:, None, None].expand(3, 1, 8)
    passed = Pass(attention, "forward", (torch.zeros(3, 2, 8), k_TGD, -k_TGD), {})
    o_THE, _ = passed.run_through()
    assert recorded.events == [
        *["send queries 0 (1)", "send keys 1 (2)", "wait keys 1", "send keys forwarded 1 (2)"],
        *["wait queries 0", "wait keys forwarded 1", "run 2 causal", "send queries back 0 (2)", "wait queries back 0"],
    ]
    # Rows 0 and 1 were received, and row 1 once more from the rank that forwarded it.
    assert o_THE[0, 0, 0] == 8 * (1.0 + 2.0 + 2.0)
    rows_kept = passed.kept()
    assert sorted(rows_kept) == ([] if kept == "nothing" else [("k", 6), ("q", 0), ("v", 6)])
    recorded.forwarded[0].zero_()  # as another exchange does
    if kept == "received":
        assert rows_kept["k", 6][:, 0, 0].tolist() == [1.0, 2.0, 2.0]
