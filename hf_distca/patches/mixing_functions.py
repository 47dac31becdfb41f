"""Convolutions and recurrences of a planned step.

A mixing module calls them in place of transformers' functions.

Each function takes the rows of all segments that a rank holds, and keeps documents apart.
Transformers' own functions compute: they may be kernels. What a segment lacks comes from the
segments before it on its path, which other ranks may hold: see `hf_distca.patches.recurrences`.

A convolution runs on rows with room before each segment: there are the rows before the segment, or
zeros.

A recurrence runs on whole documents as they are, packed if its kernel takes packed documents. A
segment whose state before it is not known runs from a state of zeros; that state, S_in, adds r·S_in
to its rows. For a gated delta rule r and A come from the same run: further columns of zero values,
from a state of ones on the diagonal, turn into r and A. For Mamba-2 and lightning attention the
decay is one number a head, and both are products of decays.

Shape suffixes: T rows, C channels, H heads, G groups of heads, K rows and V columns of a state.
"""

import inspect
import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_distca.dispatch.segment_exchanges import HaloExchange
from hf_distca.models import mixing_modules
from hf_distca.models.decoder import stock_forward
from hf_distca.patches.mixing_calls import Function, MixingCall, running_call
from hf_distca.patches.recurrences import Part, Recurrence, Result, recur


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
        call = running_call.get()
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

    def compute(part: Part) -> Result:
        query, key, value, g, beta = part.rows
        arguments = {
            **options,
            "g": g,
            "beta": beta,
            "initial_state": part.states,
            "output_final_state": part.has_later,
        }
        if part.packing is not None:
            arguments["cu_seqlens"] = part.packing.cu_seqlens
        if part.lacks_state:
            # Further columns of zero values, from a state of ones on the diagonal, become r and A.
            value = functional.pad(value, (0, state_rows))
            state = functional.pad(torch.eye(state_rows, device=value.device), (columns, 0))
            arguments["initial_state"] = state.expand(1, heads, -1, -1).contiguous()
        output, final = stock(query, key, value, **arguments)
        if not part.lacks_state:
            return Result(output, final.float() if part.has_later else None)
        output, r_1THK = output.split([columns, state_rows], 3)

        def read(state: Tensor) -> Tensor:
            return torch.einsum("thk,hkv->thv", r_1THK[0].float(), state)

        if not part.has_later:
            return Result(output, None, read)
        states, factor = final.float().split([columns, state_rows], 3)
        return Result(output, states, read, factor[0])

    shapes = (heads, state_rows, state_rows), (heads, state_rows, columns)
    recurrence = Recurrence(compute, shapes, packs=_takes_packed(stock, "cu_seqlens"), starts=True)
    return recur(call, recurrence, (query, key, value, g, beta), value), None


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

    def compute(part: Part) -> Result:
        hidden, dt, B, C = part.rows
        arguments = (
            options if part.packing is None else {**options, "seq_idx": part.packing.seq_idx}
        )
        output = stock(hidden, dt, A, B, C, return_final_states=part.has_later, **arguments)
        states = None
        if part.has_later:
            output, final = output
            states = final.float()
        if not part.lacks_state:
            return Result(output, states)
        # By how much a state has decayed since the segment began, at each row.
        dt_TH = dt[0].float() if dt_bias is None else dt[0].float() + dt_bias.float()
        dt_TH = functional.softplus(dt_TH) if dt_softplus else dt_TH
        decays_TH = (A.float() * dt_TH.clamp(*dt_limit)).cumsum(0).exp()
        C_TGN = C[0]

        def read(state: Tensor) -> Tensor:
            grouped_state = state.unflatten(0, (C_TGN.shape[1], -1))
            read_TGHV = torch.einsum("tgn,ghvn->tghv", C_TGN.float(), grouped_state)
            return read_TGHV.flatten(1, 2) * decays_TH.unsqueeze(-1)

        return Result(output, states, read, decays_TH[-1] if part.has_later else None)

    heads, columns = hidden_states.shape[2:]
    shapes = (heads,), (heads, columns, B.shape[3])
    recurrence = Recurrence(compute, shapes, packs=_takes_packed(stock, "seq_idx"), starts=False)
    return recur(call, recurrence, (hidden_states, dt, B, C), hidden_states)


def lightning_attention(
    module: Any, hidden_states: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Run a module of lightning attention over each document.

    The decay is one constant a head. The rows have no padding, so that no mask is needed.
    Transformers has the recurrence inside the module's forward.
    Here that forward runs on the projected rows, with identities for all modules around the
    recurrence.
    """
    call = running_call.get()
    stock = stock_forward(module)
    heads, size = module.num_attention_heads, module.head_dim
    identity = nn.Identity()
    inner = SimpleNamespace(**vars(module), **dict(module.named_buffers(recurse=False)))
    inner.act_fn = inner.qkv_proj = inner.norm = inner.out_proj = identity
    inner.output_gate = lambda rows: rows.new_full((), math.inf)  # its sigmoid is 1

    def compute(part: Part) -> Result:
        (qkv,) = part.rows
        output, final = stock(inner, qkv, None, None)
        output = output.unflatten(2, (heads, size))
        states = final.float() if part.has_later else None
        if not part.lacks_state:
            return Result(output, states)
        places_T1 = torch.arange(1, qkv.shape[1] + 1, device=qkv.device).unsqueeze(1)
        decays_TH: Tensor = (-inner.slope_rate.float().view(1, heads) * places_T1).exp()
        q_THK = qkv[0].unflatten(1, (heads, -1))[..., :size]

        def read(state: Tensor) -> Tensor:
            read_THV = torch.einsum("thk,hkv->thv", q_THK.float(), state)
            return read_THV * decays_TH[..., None]

        return Result(output, states, read, decays_TH[-1] if part.has_later else None)

    shapes = (heads,), (heads, size, size)
    recurrence = Recurrence(compute, shapes, packs=False, starts=False)
    # The module's own parts around the recurrence, as in its stock forward.
    qkv = module.act_fn(module.qkv_proj(hidden_states))
    values = qkv.unflatten(2, (heads, -1))[..., -size:]
    mixed = recur(call, recurrence, (qkv,), values)
    call.mixed.append(mixing_modules.LIGHTNING)
    gate = functional.sigmoid(module.output_gate(hidden_states))
    return module.out_proj(gate * module.norm(mixed.flatten(2))), None


def _convolution_and_scan(
    stock: Function, call: MixingCall, *args: Any, **kwargs: Any
) -> Tensor | None:
    """Compute a whole Mamba-2 module by one kernel.

    None if there is no kernel, or a path has several segments.
    """
    sizes = tuple(size for nano in call.plan.nano_batches for size in nano.cuts.sizes)
    if call.plan.cuts_paths or not _takes_packed(stock, "seq_idx"):
        return None
    if packing := call.plan.nano_batches[0].cuts.packing(sizes):
        kwargs["seq_idx"] = packing.seq_idx
    result: Tensor = stock(*args, **kwargs)
    return result
