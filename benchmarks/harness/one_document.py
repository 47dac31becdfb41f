"""Core attention of one document over ranks, forward and backward, without a model around it.

Or of several of equal lengths, which need no exchange: what is left is what core attention itself
takes.

Shape suffixes: L rows of the document, T local rows, S sampled rows, C rows of a chunk, H query
heads, D head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hf_distca.dispatch.core_attention import disaggregated_attention
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.kernels import AttentionParams
from hf_distca.plan import AttentionKind, MicroBatchPlan
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings

from .resident import begin_peak, follow_tensors, peak


@dataclass(frozen=True)
class OneDocument:
    """One document in float32, as many key-value heads as query heads.

    Attributes:
        buffer_bytes: K/V rows that travel at a time; None: all.
        with_gradient: of O, every so many rows have one: those whose number is divisible by this.
        documents: of equal lengths, that have so many tokens together.
    """

    tokens: int
    ranks: int
    heads: int
    head_dim: int
    buffer_bytes: int | None
    with_gradient: int = 1
    documents: int = 1

    @property
    def kind(self) -> AttentionKind:
        return AttentionKind(None, self.heads, self.heads, self.head_dim, self.head_dim)

    @property
    def settings(self) -> PlanSettings:
        buffer = {} if self.buffer_bytes is None else {"exchange_buffer_bytes": self.buffer_bytes}
        return PlanSettings(
            self.ranks, -(-self.tokens // self.ranks), (self.kind,), bytes_per_value=4, **buffer
        )

    def plan(self) -> MicroBatchPlan:
        plan = plan_micro_batch([self.tokens // self.documents] * self.documents, self.settings)
        if self.buffer_bytes is not None:
            return plan
        (nano,) = plan.nano_batches
        whole = {kind: replace(of_kind, stage_rows=None) for kind, of_kind in nano.plans.items()}
        return replace(plan, nano_batches=(replace(nano, plans=whole),))

    @property
    def params(self) -> AttentionParams:
        return AttentionParams(scale=self.head_dim**-0.5)

    def rows(self, name: str, numbers: Tensor) -> Tensor:
        """Rows of q, k, v or do, [len(numbers), heads, head_dim]; any rank makes any of them.

        Rows come in blocks of 4096, each from a generator of its own.
        """
        found = torch.empty(len(numbers), self.heads, self.head_dim)
        blocks = numbers // BLOCK
        for block in blocks.unique().tolist():
            generator = torch.Generator().manual_seed(4 * block + ("q", "k", "v", "do").index(name))
            drawn = torch.randn(BLOCK, self.heads, self.head_dim, generator=generator)
            here = blocks == block
            found[here] = drawn[numbers[here] % BLOCK]
        if name == "do":
            found[numbers % self.with_gradient != 0] = 0
        return found


BLOCK = 4096


@dataclass(frozen=True)
class Taken:
    """The most memory of a rank above what was there before q, k, v and do; o, dq, dk and dv of
    sampled rows [T].
    """

    peak_bytes: int
    stages: int
    rows: Tensor
    results: dict[str, Tensor]


def take_one_document(case: OneDocument, sampled: Sequence[int] = ()) -> Taken:
    follow_tensors()
    _take(
        replace(case, tokens=64 * case.ranks, documents=1)
    )  # code that is loaded, threads that are started
    return _take(case, sampled)


def _take(case: OneDocument, sampled: Sequence[int] = ()) -> Taken:
    dispatcher = Dispatcher(case.settings, torch.device("cpu"))
    plan = case.plan()
    length = case.tokens // case.documents
    dist.barrier()
    before = begin_peak()
    numbers_T = torch.cat(
        [
            document * length + torch.arange(start, stop)
            for document, start, stop in plan.held_by(dist.get_rank())
        ]
    )
    q_THD, k_THD, v_THD = (case.rows(name, numbers_T).requires_grad_() for name in ("q", "k", "v"))
    do_THD = case.rows("do", numbers_T)
    bound = dispatcher.bind(plan)
    o_THD = disaggregated_attention(q_THD, k_THD, v_THD, None, bound, case.params)
    o_THD.backward(do_THD)
    taken = peak() - before
    mine = torch.from_numpy(np.flatnonzero(np.isin(numbers_T.numpy(), sampled)))
    gradients = (q_THD.grad, k_THD.grad, v_THD.grad)
    results = {"o": o_THD.detach()[mine]}
    results |= {
        name: x_THD[mine]
        for name, x_THD in zip(("dq", "dk", "dv"), gradients, strict=True)
        if x_THD is not None
    }
    routes = bound.nano_batches[0].routes.get(case.kind)  # None where nothing moves
    return Taken(taken, len(routes.keys) if routes else 0, numbers_T[mine], results)


def reference(case: OneDocument, sampled: Sequence[int], chunk: int = 512) -> dict[str, Tensor]:
    """o, dq, dk and dv of sampled rows in float64, from the definition of softmax(QK^T)V, chunk by
    chunk of queries.

    Only queries that are sampled or have a gradient are computed.
    """
    every = torch.arange(case.tokens)
    k_LHD, v_LHD = (case.rows(name, every).double() for name in ("k", "v"))
    sampled_S = torch.tensor(sorted(sampled))
    queries = torch.cat([every[every % case.with_gradient == 0], sampled_S]).unique()
    found = {
        name: torch.zeros(len(sampled_S), case.heads, case.head_dim).double()
        for name in ("o", "dq", "dk", "dv")
    }
    for rows_C in queries.split(chunk):
        q_CHD, do_CHD = (case.rows(name, rows_C).double() for name in ("q", "do"))
        keys = slice(0, int(rows_C[-1]) + 1)
        visible_CL = every[keys] <= rows_C[:, None]
        for head in range(case.heads):
            k_LD = k_LHD[keys, head]
            v_LD = v_LHD[keys, head]
            do_CD = do_CHD[:, head]
            p_CL = (
                (case.params.scale * q_CHD[:, head] @ k_LD.T)
                .masked_fill_(~visible_CL, -torch.inf)
                .softmax(-1)
            )
            o_CD = p_CL @ v_LD
            ds_CL = (
                p_CL * (do_CD @ v_LD.T - (do_CD * o_CD).sum(-1, keepdim=True)) * case.params.scale
            )
            seen = sampled_S < keys.stop
            columns = sampled_S[seen]
            found["dk"][seen, head] += ds_CL[:, columns].T @ q_CHD[:, head]
            found["dv"][seen, head] += p_CL[:, columns].T @ do_CD
            here = torch.isin(sampled_S, rows_C)
            of_chunk = torch.searchsorted(rows_C, sampled_S[here])
            found["o"][here, head] = o_CD[of_chunk]
            found["dq"][here, head] = (ds_CL[of_chunk]) @ k_LD
    return found
