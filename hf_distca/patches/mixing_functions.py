"""Convolutions and recurrences of a planned step.

A mixing module calls them in place of transformers' functions.

Each function takes the rows of all segments that a rank holds, and keeps documents apart.
Transformers' own functions compute: they may be kernels. What a segment lacks, since its document
was cut, comes from the ranks with its other segments, see `hf_distca.dispatch.segment_exchanges`.

A convolution runs on rows with room before each segment: there are the rows before the segment, or
zeros.

A recurrence runs on whole documents as they are, packed if its kernel takes packed documents. Of a
cut document, a segment runs from a state of zeros; the state before it, S_in, adds r·S_in to its
rows. For a gated delta rule r and A come from the same run: further columns of zero values, from a
state of ones on the diagonal, turn into r and A. For Mamba-2 and lightning attention the decay is
one number a head, and both are products of decays.

Shape suffixes: T rows, C channels, H heads, G groups of heads, K rows and V columns of a state.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_distca.dispatch.bound import BoundNanoBatch, BoundPlan
from hf_distca.dispatch.executor import without_autocast
from hf_distca.dispatch.segment_exchanges import HaloExchange, Packing, StateExchange, Transition
from hf_distca.models import mixing_modules
from hf_distca.models.decoder import stock_forward

Function = Callable[..., Any]

_call: ContextVar["MixingCall"] = ContextVar("mixing module that runs")


class MixingCall:
    """One call of a mixing module in a planned step."""

    def __init__(self, module: nn.Module, plan: BoundPlan) -> None:
        self.module = module
        self.plan = plan
        self.mixed: list[str] = []  # functions that the module has called, in order

    def run(self, forward: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module's forward. Replaced functions find this call while it runs."""
        token = _call.set(self)
        try:
            return forward(*args, **kwargs)
        finally:
            _call.reset(token)

    def pause(self) -> None:
        """Let the other nano-batch run while rows or states travel."""
        if self.plan.cuts_documents:
            self.plan.pause()

    def exchange(self, nano: BoundNanoBatch) -> dict[str, Any]:
        """Return the arguments of an exchange of the module on a nano-batch."""
        runtime = self.plan.runtime
        return {
            "nano_batch": nano.index,
            "module": self.module,
            "exchange": runtime.exchange,
            "recorder": runtime.recorder,
            "kept": self.plan.kept_results,
        }

    def of_nano_batches(self, x_1T: Tensor) -> Sequence[Tensor]:
        """Divide rows [1, T, ...] between the nano-batches of the call."""
        return torch.split(x_1T, [nano.rows for nano in self.plan.nano_batches], 1)


def planned_functions(stock: dict[str, Any]) -> dict[str, Function]:
    """Return the functions of planned steps, by the name of the stock function of each.

    The names are global names of the file of a mixing module.
    """
    planned: dict[str, Function] = {
        mixing_modules.CONVOLUTION: _convolution,
        mixing_modules.DELTA_RULE: _delta_rule,
        mixing_modules.KIMI_DELTA_RULE: _delta_rule,
        mixing_modules.SCAN: _scan,
        mixing_modules.CONVOLUTION_AND_SCAN: _convolution_and_scan,
    }

    def replaced(name: str, *args: Any, **kwargs: Any) -> Any:
        call = _call.get()
        function = call.plan.runtime.functions.get(name, stock[name])
        result = planned[name](function, call, *args, **kwargs)
        if result is not None:
            is_both = name == mixing_modules.CONVOLUTION_AND_SCAN
            call.mixed += [mixing_modules.CONVOLUTION, mixing_modules.SCAN] if is_both else [name]
        return result

    return {name: partial(replaced, name) for name in planned if name in stock}


def _takes_packed(stock: Function, argument: str) -> bool:
    """Return whether transformers' function is a kernel that keeps packed documents apart."""
    if hasattr(stock, "packed_by"):  # a stand-in
        return bool(stock.packed_by == argument)
    try:  # transformers wraps its functions, and drops arguments that the kernel does not know
        variables = inspect.getclosurevars(stock).nonlocals
    except TypeError:  # a kernel of the Hub
        return False
    is_kernel = bool(variables.get("is_new_implementation"))
    return is_kernel and argument in variables.get("applicable_params", ())


def _convolution(
    stock: Function, call: MixingCall, x_1CT: Tensor, weight: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Compute a causal convolution over each document."""
    width = weight.shape[-1] - 1  # rows before a row that the convolution reads
    x_TC = x_1CT.transpose(1, 2)
    parts = []
    for nano, x_1TC in zip(call.plan.nano_batches, call.of_nano_batches(x_TC), strict=True):
        exchange = HaloExchange(nano.cuts.halos(width), **call.exchange(nano))
        rows_TC = x_1TC.squeeze(0)
        parts.append((exchange, rows_TC, exchange.send(rows_TC)))
    call.pause()
    results = []
    for exchange, rows_TC, token in parts:
        x_1CX = exchange.receive(token, rows_TC).T.unsqueeze(0)
        has_rows = x_1CX.shape[2] > 0
        out_1CX = stock(x_1CX, weight, *args, **kwargs) if has_rows else x_1CX
        results.append(out_1CX.squeeze(0).T.index_select(0, exchange.bound.places_T))
    return torch.cat(results).T.unsqueeze(0)


Read = Callable[[Tensor], Tensor]
"""Function that turns the state before a segment into r·S in float32, [T, H, V]."""


class Result(NamedTuple):
    """Results of a recurrence that starts from a state of zeros, on whole documents or a segment.

    Attributes:
        rows: [1, T, H, V] outputs.
        read: function that returns the share of the state before a segment in the segment's rows;
            None if no rows come before.
        transition: A and B of a segment: the state after the segment is A·S + B.
    """

    rows: Tensor
    read: Read | None
    transition: Transition


Run = Callable[[Sequence[Tensor], Packing | None, bool, bool], Result]
"""Function that computes whole documents, or one segment of a cut document from a state of zeros.

Its arguments are the rows of each tensor that the recurrence reads, how packed documents are told
apart, whether the document has earlier segments, and whether it has later ones. With earlier
segments it computes r; with later segments B; with both A too.
"""


def _delta_rule(
    stock: Function,
    call: MixingCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: None = None,
    output_final_state: bool = False,
    cu_seqlens: None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute a gated delta rule over each document.

    The decay is a number for each head, or for each row of a state (Kimi Delta Attention).
    """
    heads, columns, state_rows = *value.shape[2:], key.shape[3]

    def run(
        rows: Sequence[Tensor], packing: Packing | None, has_earlier: bool, has_later: bool
    ) -> Result:
        query, key, value, g, beta = rows
        arguments = {
            **options,
            "g": g,
            "beta": beta,
            "initial_state": None,
            "output_final_state": has_later,
        }
        if packing is not None:
            arguments["cu_seqlens"] = packing.cu_seqlens
        if has_earlier:
            # Further columns of zero values, from a state of ones on the diagonal, become r and A.
            value = functional.pad(value, (0, state_rows))
            state = functional.pad(torch.eye(state_rows, device=value.device), (columns, 0))
            arguments["initial_state"] = state.expand(1, heads, -1, -1).contiguous()
        output, final = stock(query, key, value, **arguments)
        factor = offset = None
        if has_later:
            offset, factor = final[0].float().split([columns, final.shape[3] - columns], 2)
        if not has_earlier:
            return Result(output, None, (None, offset))
        output, r_1THK = output.split([columns, state_rows], 3)

        def read(state: Tensor) -> Tensor:
            return torch.einsum("thk,hkv->thv", r_1THK[0].float(), state)

        return Result(output, read, (factor, offset))

    shapes = (heads, state_rows, state_rows), (heads, state_rows, columns)
    return _recur(
        call, (query, key, value, g, beta), value, _takes_packed(stock, "cu_seqlens"), shapes, run
    ), None


def _scan(
    stock: Function,
    call: MixingCall,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_states: None = None,
    return_final_states: bool = False,
    **options: Any,
) -> Tensor:
    """Compute the state space of Mamba-2 over each document.

    The decay is one number a head and row.
    """
    options |= {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}

    def run(
        rows: Sequence[Tensor], packing: Packing | None, has_earlier: bool, has_later: bool
    ) -> Result:
        hidden, dt, B, C = rows
        arguments = options if packing is None else {**options, "seq_idx": packing.seq_idx}
        output = stock(hidden, dt, A, B, C, return_final_states=has_later, **arguments)
        offset = None
        if has_later:
            output, final = output
            offset = final[0].float()
        if not has_earlier:
            return Result(output, None, (None, offset))
        # By how much a state has decayed since the segment began, at each row.
        dt_TH = dt[0].float() if dt_bias is None else dt[0].float() + dt_bias.float()
        dt_TH = functional.softplus(dt_TH) if dt_softplus else dt_TH
        decays_TH = (A.float() * dt_TH.clamp(*dt_limit)).cumsum(0).exp()
        C_TGN = C[0]

        def read(state: Tensor) -> Tensor:
            grouped_state = state.unflatten(0, (C_TGN.shape[1], -1))
            read_TGHV = torch.einsum("tgn,ghvn->tghv", C_TGN.float(), grouped_state)
            return read_TGHV.flatten(1, 2) * decays_TH.unsqueeze(-1)

        return Result(output, read, (decays_TH[-1] if has_later else None, offset))

    heads, columns = hidden_states.shape[2:]
    shapes = (heads,), (heads, columns, B.shape[3])
    return _recur(
        call, (hidden_states, dt, B, C), hidden_states, _takes_packed(stock, "seq_idx"), shapes, run
    )


def lightning_attention(
    module: Any, hidden_states: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Run a module of lightning attention over each document.

    The decay is one constant a head. The rows have no padding, so that no mask is needed.
    Transformers has the recurrence inside the module's forward.
    Here that forward runs on the projected rows, with identities for all modules around the
    recurrence.
    """
    call = _call.get()
    stock = stock_forward(module)
    heads, size = module.num_attention_heads, module.head_dim
    identity = nn.Identity()
    inner = SimpleNamespace(**vars(module), **dict(module.named_buffers(recurse=False)))
    inner.act_fn = inner.qkv_proj = inner.norm = inner.out_proj = identity
    inner.output_gate = lambda rows: rows.new_full((), math.inf)  # its sigmoid is 1

    def run(
        rows: Sequence[Tensor], packing: Packing | None, has_earlier: bool, has_later: bool
    ) -> Result:
        (qkv,) = rows
        output, final = stock(inner, qkv, None, None)
        output = output.unflatten(2, (heads, size))
        offset = final[0].float() if has_later else None
        if not has_earlier:
            return Result(output, None, (None, offset))
        places_T1 = torch.arange(1, qkv.shape[1] + 1, device=qkv.device).unsqueeze(1)
        decays_TH: Tensor = (-inner.slope_rate.float().view(1, heads) * places_T1).exp()
        q_THK = qkv[0].unflatten(1, (heads, -1))[..., :size]

        def read(state: Tensor) -> Tensor:
            read_THV = torch.einsum("thk,hkv->thv", q_THK.float(), state)
            return read_THV * decays_TH[..., None]

        return Result(output, read, (decays_TH[-1] if has_later else None, offset))

    # The module's own parts around the recurrence, as in its stock forward.
    qkv = module.act_fn(module.qkv_proj(hidden_states))
    values = qkv.unflatten(2, (heads, -1))[..., -size:]
    mixed = _recur(call, (qkv,), values, False, ((heads,), (heads, size, size)), run)
    call.mixed.append(mixing_modules.LIGHTNING)
    gate = functional.sigmoid(module.output_gate(hidden_states))
    return module.out_proj(gate * module.norm(mixed.flatten(2))), None


def _convolution_and_scan(
    stock: Function, call: MixingCall, *args: Any, **kwargs: Any
) -> Tensor | None:
    """Compute a whole Mamba-2 module by one kernel.

    None if there is no kernel, or documents are cut.
    """
    sizes = tuple(size for nano in call.plan.nano_batches for size in nano.cuts.sizes)
    if call.plan.cuts_documents or not _takes_packed(stock, "seq_idx"):
        return None
    if packing := call.plan.nano_batches[0].cuts.packing(sizes):
        kwargs["seq_idx"] = packing.seq_idx
    result: Tensor = stock(*args, **kwargs)
    return result


def _recur(
    call: MixingCall,
    tensors: Sequence[Tensor],
    values: Tensor,
    packed: bool,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    run: Run,
) -> Tensor:
    """Compute a recurrence over each document, [1, T, H, V].

    Cut segments come first: while their states travel, whole documents are computed, those of both
    nano-batches.

    Args:
        tensors: [1, T, ...] each, what the recurrence reads.
        values: [1, T, H, V], of the shape of the result.
        packed: whether whole documents may be computed in one call.
        shapes: of A and B.
    """
    nano_batches = call.plan.nano_batches
    divided = zip(nano_batches, *map(call.of_nano_batches, tensors), strict=True)
    parts = [
        _Recurrence(call, nano, rows, values[:, :0], run, packed=packed, shapes=shapes)
        for nano, *rows in divided
    ]
    for part in parts:
        part.send_states()
    # The second nano-batch computes before the pause, because the first is about to wait.
    is_second = nano_batches[0].index == 1
    if is_second:
        parts[0].compute_documents()
    call.pause()
    outputs = []
    for part in parts:
        if not is_second:
            part.compute_documents()
        outputs += part.receive_states()
    return torch.cat(outputs, 1)


class _Recurrence:
    """Recurrence over the rows of one nano-batch, in three steps.

    Args:
        rows: [1, T, ...] of the nano-batch, of each tensor that the recurrence reads.
        no_rows: [1, 0, H, V].
        packed: whether whole documents between two cut segments are computed in one call.
        shapes: of A and B.
    """

    def __init__(
        self,
        call: MixingCall,
        nano: BoundNanoBatch,
        rows: Sequence[Tensor],
        no_rows: Tensor,
        run: Run,
        *,
        packed: bool,
        shapes: tuple[tuple[int, ...], tuple[int, ...]],
    ) -> None:
        self._rows = rows
        self._no_rows = no_rows
        self._run = run
        self._cuts = nano.cuts
        self._chains = nano.cuts.chains
        self._exchange = StateExchange(self._chains, shapes, **call.exchange(nano))
        # By call: the number of its cut segment, or None; and the rows of each of its documents.
        self._calls = _calls_on_segments(self._chains.cut, nano.cuts.sizes, packed=packed)
        lengths = [sum(sizes) for _, sizes in self._calls]
        divided = (torch.split(x, lengths, 1) for x in rows)
        self._inputs = list(zip(*divided, strict=True))
        self._results: dict[int, Result] = {}  # by call
        self._transitions: list[Transition] = []  # of cut segments
        self._token: Tensor

    def send_states(self) -> None:
        """Compute the segments of cut documents and start to send their transitions."""
        for index, (number, _) in enumerate(self._calls):
            if number is not None:
                has_earlier = bool(self._chains.earlier[number])
                has_later = bool(self._chains.later[number])
                result = self._run(self._inputs[index], None, has_earlier, has_later)
                self._results[index] = result
                self._transitions.append(result.transition)
        self._token = self._exchange.send(self._transitions, self._rows)

    def compute_documents(self) -> None:
        """Compute whole documents."""
        for index, (number, sizes) in enumerate(self._calls):
            if number is None:
                packing = self._cuts.packing(sizes)
                self._results[index] = self._run(self._inputs[index], packing, False, False)

    def receive_states(self) -> list[Tensor]:
        """Add the share of the states before the segments of cut documents.

        Returns:
            The rows of each call.
        """
        outputs = [self._results[index].rows for index in range(len(self._calls))]
        # Some result goes through the exchange on every rank, see `StateExchange.receive`.
        outputs = outputs or [self._no_rows]
        outputs[0], states = self._exchange.receive(self._token, outputs[0], self._transitions)
        for index, (number, _) in enumerate(self._calls):
            state = None if number is None else states[number]
            if state is None:
                continue
            read_state = self._results[index].read
            assert read_state is not None  # the segment has a state before it
            rows = outputs[index]
            with without_autocast(state.device.type):
                outputs[index] = (rows.float() + read_state(state)).to(rows.dtype)
        return outputs


def _calls_on_segments(
    cut: Sequence[int], sizes: Sequence[int], *, packed: bool
) -> list[tuple[int | None, tuple[int, ...]]]:
    """Divide segments into calls: a cut segment, whole documents side by side, or one document.

    Args:
        cut: segments of cut documents.
        sizes: rows of each segment.

    Returns:
        For each call, in row order: the number of its segment in `cut`, or None for whole
        documents; and the rows of its segments.
    """
    numbers = {segment: number for number, segment in enumerate(cut)}
    calls: list[tuple[int | None, tuple[int, ...]]] = []
    documents: list[int] = []  # rows of whole documents that share the next call
    for segment, size in enumerate(sizes):
        if segment in numbers:
            if documents:
                calls.append((None, tuple(documents)))
                documents = []
            calls.append((numbers[segment], (size,)))
        elif packed:
            documents.append(size)
        else:
            calls.append((None, (size,)))
    if documents:
        calls.append((None, tuple(documents)))
    return calls
