"""One core attention at the servers, as a rank sees it: its rows go there, and the results come back.

Shape suffixes: T local rows, H query heads, G key/value heads, D head dim of queries and keys, E head dim of values, N
rows; what follows a row's N is free.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hf_distca.dispatch.recorder import Recorder, Span, Work
from hf_distca.dispatch.remote import ServerRows
from hf_distca.dispatch.rows import RowIndex, take
from hf_distca.kernels import AttentionParams
from hf_distca.plan import AttentionKind, Plan
from hf_distca.planner.lost import plan_lost
from hf_distca.planner.settings import PlanSettings
from hf_distca.pool.messages.call import Call
from hf_distca.pool.messages.tensor_spec import TensorSpec
from hf_distca.pool.rank.link import PendingReply
from hf_distca.pool.rank.members import Members
from hf_distca.pool.wire.errors import LinkLost


class PlanAtServers:
    """The plan of one micro-batch as the servers know it.

    Args:
        plan_id: of the plan.
        servers: ids of the plan's servers.
        members: who takes part.
        call_ids: ids of calls; the same on every rank.
        recorder: told what calls take, and servers to compute them.
        settings: with which the plan was made.
        pairs_per_second: of a rank, forward and backward together; the same on every rank.
    """

    def __init__(
        self,
        plan_id: int,
        servers: tuple[int, ...],
        members: Members,
        call_ids: Iterator[int],
        recorder: Recorder,
        settings: PlanSettings,
        pairs_per_second: float,
    ) -> None:
        self._plan_id = plan_id
        self._servers = servers
        self._members = members
        self._call_ids = call_ids
        self._recorder = recorder
        self._settings = settings
        self._pairs_per_second = pairs_per_second

    def start(
        self,
        work: Work,
        servers: Sequence[ServerRows],
        kind: AttentionKind,
        params: AttentionParams,
        rows: Mapping[str, Tensor],
    ) -> "CallAtServers":
        """See `hf_distca.dispatch.remote.RemotePlan.start`."""
        q_THD, k_TGD, v_TGE = rows["q"], rows["k"], rows["v"]
        call = Call(
            plan_id=self._plan_id,
            call_id=next(self._call_ids),
            nano_batch=work.nano_batch,
            window=params.window,
            direction=work.direction,
            scale=params.scale,
            softcap=params.softcap,
            q_heads=q_THD.shape[1],
            kv_heads=k_TGD.shape[1],
            dim_qk=q_THD.shape[2],
            dim_v=v_TGE.shape[2],
            dtype=str(q_THD.dtype).removeprefix("torch."),
            chunk=kind.chunk,
        )
        under_way = CallAtServers(
            {asked.server: self._servers[asked.server] for asked in servers},
            self._members,
            self._recorder,
            work,
            q_THD.device,
        )
        for asked in servers:
            under_way.ask(asked, call, rows)
        return under_way

    def repair(self, plan: Plan, kind: AttentionKind, lost: frozenset[int]) -> Plan:
        """See `hf_distca.dispatch.remote.RemotePlan.repair`."""
        workers = [plan.layout.ranks + server for server in lost]
        return plan_lost(plan, workers, kind, self._settings, self._pairs_per_second)


class CallAtServers:
    """One core attention's tasks at the servers, from the sending of rows to the collection of results.

    Args:
        servers: id by server index, of all servers that have tasks of it.
        members: who takes part.
        recorder: told what calls take, and servers to compute them.
        work: which core attention.
        device: the rank's.
    """

    def __init__(
        self,
        servers: dict[int, int],
        members: Members,
        recorder: Recorder,
        work: Work,
        device: torch.device,
    ) -> None:
        self._servers = servers
        self._members = members
        self._recorder = recorder
        self._work = work
        self._device = device
        self._replies: dict[int, tuple[PendingReply, dict[str, Tensor]]] = {}  # by server index

    def ask(self, asked: ServerRows, call: Call, rows: Mapping[str, Tensor]) -> None:
        """Send a server its rows, if it takes part and this rank has any for it.

        Args:
            asked: the server, and which rows it needs.
            call: what it is to compute.
            rows: all local rows by column name.
        """
        link = self._members.link(self._servers[asked.server])
        if link is None or not asked.q_count + asked.k_count:
            return
        memory = self._members.memory
        staged, ready = memory.stage([take(rows[spec.name], _index(asked, spec)) for spec in call.request()])
        results = {spec.name: memory.empty(spec, _count(asked, spec)) for spec in call.reply()}
        try:
            reply = link.call(call, staged, list(results.values()), ready)
        except LinkLost:
            return  # the collection will find the link lost
        self._replies[asked.server] = (reply, results)

    def collect(self) -> tuple[dict[int, dict[str, Tensor]], frozenset[int]]:
        """See `hf_distca.dispatch.remote.RemoteCall.collect`."""
        for server, (reply, _) in self._replies.items():
            try:
                said = reply.wait(self._members.timeout_s)
            except LinkLost:
                continue
            name = str(self._servers[server])
            self._recorder.add(Span("call", name, self._work, reply.departed, reply.arrived))
            begin = reply.arrived - said.seconds
            self._recorder.add(Span("server", name, self._work, begin, reply.arrived, said.pairs))
        lost_ids = self._members.without_lost(list(self._servers.values()))
        lost = frozenset(server for server, id in self._servers.items() if id in lost_ids)
        results = {
            server: {name: rows_N.to(self._device, non_blocking=True) for name, rows_N in columns.items()}
            for server, (_, columns) in self._replies.items()
            if server not in lost
        }
        return results, lost


def _index(asked: ServerRows, spec: TensorSpec) -> RowIndex:
    return asked.q_rows if spec.rows == "queries" else asked.k_rows


def _count(asked: ServerRows, spec: TensorSpec) -> int:
    return asked.q_count if spec.rows == "queries" else asked.k_count
