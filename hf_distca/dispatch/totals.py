"""Accumulators of one core attention: O and log-sum-exp, or gradients, from all calls that compute parts of them.

Shape suffixes: T local rows, Q query rows of a kernel call, R received rows, G key/value heads, H query heads, D head
dim of queries and keys, E head dim of values.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from hf_distca.dispatch.bound import BoundGroup, BoundRoutes, Source
from hf_distca.dispatch.rows import RowIndex, add_rows, merge_rows, put, take
from hf_distca.planner.schedule import KernelCall, Location

Columns = dict[str, Tensor]
"""Rows of one place, by column."""

Results = tuple[Tensor, Tensor]
"""O and LSE of some rows."""

DQ, DK, DV = DQKV = ("dq", "dk", "dv")


class Outputs:
    """O and log-sum-exp of local rows, and of received queries."""

    def __init__(self, routes: BoundRoutes, local: Columns) -> None:
        self._routes, self._q_THD, self._v_TGE = routes, local["q"], local["v"]
        self._results: dict[Location, Results] = {}

    def add(self, call: KernelCall, group: BoundGroup, part: tuple[Tensor, ...]) -> None:
        """Put or merge the results of a kernel call, O and LSE."""
        o_QHE, lse_QH = part
        if not call.first:
            merge_rows(*self._at(call.queries), group.q_rows, o_QHE, lse_QH)
        elif group.q_rows == slice(0, self._routes.rows[call.queries]) and not self._routes.merges:
            self._results[call.queries] = o_QHE, lse_QH
        else:
            self._put(call.queries, group.q_rows, (o_QHE, lse_QH))

    def add_from_ranks(self, columns: Columns) -> None:
        """Put results of queries that other ranks computed."""
        self._put("local", self._routes.queries.rows, (columns["o"], columns["lse"]))

    def add_from_servers(
        self, results: Mapping[int, Mapping[str, Tensor]], repaired: tuple[Tensor, ...] | None
    ) -> None:
        """Put results that servers computed.

        Args:
            results: columns by server.
            repaired: results of the ranks for lost servers' tasks; None if no server was lost.
        """
        for asked in self._routes.servers:
            if asked.server in results:
                came = results[asked.server]
                self._put("local", asked.q_rows, (came["o"], came["lse"]))
            elif repaired is not None:
                o_QHE, lse_QH = (take(x_T, asked.q_rows) for x_T in repaired)
                self._put("local", asked.q_rows, (o_QHE, lse_QH))

    def of_received_queries(self) -> Results:
        """Return O and LSE that go back to other ranks."""
        return self._final("received")

    def final(self) -> Results:
        """Return O and LSE of local rows."""
        return self._final("local")

    def _final(self, place: Location) -> Results:
        """Return O and LSE at a place, in the dtypes in which they travel."""
        o_THE, lse_TH = self._at(place)
        return o_THE.to(self._q_THD.dtype), lse_TH

    def _at(self, place: Location) -> Results:
        """Return O and LSE so far of the query rows at a place.

        Rows without a result yet are undefined. Where results of several stages are merged, such received rows hold
        the result of no keys, and O is at least float32.
        """
        if place not in self._results:
            rows, heads, dim = self._routes.rows[place], self._q_THD.shape[1], self._v_TGE.shape[2]
            wide = torch.promote_types(self._q_THD.dtype, torch.float32)
            merges = self._routes.merges
            o_THE = self._q_THD.new_empty((rows, heads, dim), dtype=wide if merges else self._q_THD.dtype)
            lse_TH = self._q_THD.new_empty((rows, heads), dtype=wide)
            if merges and place == "received":
                o_THE.zero_()
                lse_TH.fill_(-torch.inf)
            self._results[place] = o_THE, lse_TH
        return self._results[place]

    def _put(self, place: Location, index: RowIndex, part: Results) -> None:
        for x_T, rows_Q in zip(self._at(place), part, strict=True):
            put(x_T, index, rows_Q.to(x_T.dtype))


class Gradients:
    """dQ, dK and dV of local rows, and of received rows.

    With several stages, parts are added to totals at once; otherwise they are kept and added up at the end. No input
    is kept, so that its memory can be freed.
    """

    def __init__(self, routes: BoundRoutes, local: Columns) -> None:
        self._routes = routes
        inputs = {name: local[name.removeprefix("d")] for name in DQKV}
        self._no_rows = {name: x_T.new_empty((0, *x_T.shape[1:])) for name, x_T in inputs.items()}
        self._parts: dict[tuple[Source, int], Columns] = {}  # by source and stage
        self._totals: dict[tuple[Location, str], Tensor] = {}  # over the stages so far
        self._repaired: tuple[Tensor, ...] | None = None

    def add(self, call: KernelCall, group: BoundGroup, part: tuple[Tensor, ...]) -> None:
        """Add the gradients of a kernel call.

        dK and dV of received rows wait for `write_received_keys`.
        """
        columns = self._parts[call.group] = dict(zip(DQKV, part, strict=True))
        if not self._routes.divided:
            return
        for name in DQKV if call.keys == "local" else (DQ,):
            place: Location = call.queries if name == DQ else "local"
            index, rows = (group.q_rows if name == DQ else group.k_rows), columns.pop(name)
            if (place, name) not in self._totals and index == slice(0, self._routes.rows[place]):
                self._totals[place, name] = rows.to(torch.promote_types(rows.dtype, torch.float32))
            elif name == DQ:
                add_rows(self._total(place, name), index, rows)
            else:  # tasks may share keys
                self._routes.own_key_sums[call.tasks].add_up([self._total(place, name), rows])

    def add_from_ranks(self, columns: Columns) -> None:
        """Take gradients of local rows that other ranks computed."""
        self._parts.setdefault(("ranks", 0), {}).update(columns)

    def add_from_stage(self, stage: int, columns: Columns) -> None:
        """Add dK and dV of a stage's local rows, which other ranks computed."""
        key_sums = self._routes.stages[stage].key_sums
        if key_sums is None:
            self.add_from_ranks(columns)
            return
        for name, rows_T in columns.items():
            key_sums.add_up([self._total("local", name), rows_T])

    def add_forwarded(self, stage: int, columns_R: Sequence[Tensor], forwarded: Columns) -> None:
        """Add dK and dV of forwarded rows to the gateway's copies, before those return to their owners."""
        received = sum(self._routes.stages[stage].keys.received)
        for column_R, forwarded_R in zip(columns_R, forwarded.values(), strict=True):
            self._routes.stages[stage].forwarded_sums.add_up([column_R[:received], forwarded_R])

    def add_from_servers(
        self, results: Mapping[int, Mapping[str, Tensor]], repaired: tuple[Tensor, ...] | None
    ) -> None:
        """Take gradients that servers computed, see `Outputs.add_from_servers`."""
        self._repaired = repaired
        columns: dict[str, list[Tensor]] = {name: [] for name in DQKV}
        for asked in self._routes.servers:  # the order that the sums expect
            for name, rows in zip(DQKV, (asked.q_count, asked.k_count, asked.k_count), strict=True):
                came = results.get(asked.server)
                columns[name].append(came[name] if came else self._zeros(name, rows, self._no_rows[name].dtype))
        self._parts["servers", 0] = {name: torch.cat(parts) for name, parts in columns.items()}

    def of_received_queries(self) -> Sequence[Tensor]:
        """Return dQ that goes back to other ranks."""
        dq_RHD = self._total("received", DQ) if self._routes.divided else self._part(DQ, 0, "remote-query")
        return [dq_RHD.to(self._no_rows[DQ].dtype)]

    def write_received_keys(self, stage: int, columns_R: Sequence[Tensor]) -> None:
        """Write dK and dV of a stage's received rows to the memory from which they are sent back."""
        sums = self._routes.stages[stage].received_sums
        for name, column_R in zip((DK, DV), columns_R, strict=True):
            sums.add_up(partial(self._part, name, stage), out=column_R)
        if self._routes.divided:  # their dQ has been added up: free the memory
            for source in sums.sources:
                self._parts.pop((source, stage), None)

    def final(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return dQ, dK and dV of local rows."""
        sums = self._routes.query_sums, self._routes.key_sums, self._routes.key_sums
        dq_THD, dk_TGD, dv_TGE = (
            of_sources.add_up(partial(self._part, name, 0)) for name, of_sources in zip(DQKV, sums, strict=True)
        )
        if self._repaired is not None:
            for total, repaired in zip((dq_THD, dk_TGD, dv_TGE), self._repaired, strict=True):
                total.add_(repaired)
        dtype = self._no_rows[DQ].dtype
        return dq_THD.to(dtype), dk_TGD.to(dtype), dv_TGE.to(dtype)

    def _part(self, name: str, stage: int, source: Source) -> Tensor:
        """Return a gradient from one source; zero rows if the rank has no such tasks."""
        if source == "total":
            return self._total("local", name)
        return self._parts.get((source, stage), self._no_rows)[name]

    def _total(self, place: Location, name: str) -> Tensor:
        """Return a gradient of all rows at a place, summed over the stages so far in at least float32."""
        if (place, name) not in self._totals:
            wide = torch.promote_types(self._no_rows[name].dtype, torch.float32)
            self._totals[place, name] = self._zeros(name, self._routes.rows[place], wide)
        return self._totals[place, name]

    def _zeros(self, name: str, rows: int, dtype: torch.dtype) -> Tensor:
        like = self._no_rows[name]
        return like.new_zeros((rows, *like.shape[1:]), dtype=dtype)
