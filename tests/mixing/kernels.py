"""Stand-ins for kernels of flash-linear-attention and mamba-ssm, which take packed documents and count their calls."""

from contextlib import contextmanager

import pytest
import torch
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.bamba import modeling_bamba
from transformers.models.qwen3_next import modeling_qwen3_next

CALLS: list[tuple[str, int]] = []
"""Name of the kernel and number of documents, of each call."""

_rule = modeling_qwen3_next.torch_chunk_gated_delta_rule.__wrapped__
_scan = modeling_bamba.mamba2_chunk_scan.__wrapped__
_convolution = modeling_bamba.causal_conv1d_fn.__wrapped__


def chunk_gated_delta_rule(
    q, k, v, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None
):
    """As fla.ops.gated_delta_rule has it."""
    sizes = [q.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
    CALLS.append(("delta rule", len(sizes)))
    assert len(sizes) == 1 or (initial_state is None and not output_final_state)
    options = {"initial_state": initial_state, "output_final_state": output_final_state}
    results = [
        _rule(q_, k_, v_, g=g_, beta=b_, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **options)
        for q_, k_, v_, g_, b_ in zip(*(x.split(sizes, 1) for x in (q, k, v, g, beta)), strict=True)
    ]
    return torch.cat([out for out, _ in results], 1), results[0][1]


def mamba_chunk_scan_combined(
    x,
    dt,
    A,
    B,
    C,
    chunk_size,
    D,
    dt_bias=None,
    seq_idx=None,
    dt_softplus=False,
    dt_limit=None,
    return_final_states=False,
):
    """As mamba_ssm.ops.triton.ssd_combined has it."""
    sizes = [x.shape[1]] if seq_idx is None else torch.bincount(seq_idx[0]).tolist()
    CALLS.append(("scan", len(sizes)))
    assert len(sizes) == 1 or not return_final_states
    options = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
    results = [
        _scan(x_, dt_, A, B_, C_, chunk_size, return_final_states=return_final_states, **options)
        for x_, dt_, B_, C_ in zip(*(each.split(sizes, 1) for each in (x, dt, B, C)), strict=True)
    ]
    return results[0] if return_final_states else torch.cat(results, 1)


def causal_conv1d_fn(x, weight, bias=None, activation=None):
    """As causal_conv1d has it."""
    CALLS.append(("convolution", 1))
    return _convolution(x, weight, bias, activation)


def mamba_split_conv1d_scan_combined(
    zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, seq_idx=None, outproj_weight=None
):
    """As mamba_ssm.ops.triton.ssd_combined has it; gives back the gate's rows, and adds nothing of other documents."""
    CALLS.append(("whole module", 1 if seq_idx is None else int(seq_idx.max()) + 1))
    return zxbcdt[..., : outproj_weight.shape[0]]


@contextmanager
def installed(*, fused: bool = False):
    """Files of transformers as if the packages had been there when they were imported; yields the calls."""
    changes = {
        (modeling_qwen3_next, "torch_chunk_gated_delta_rule"): "chunk_gated_delta_rule",
        (modeling_qwen3_next, "causal_conv1d_fn"): "causal_conv1d_fn",
        (modeling_bamba, "mamba2_chunk_scan"): "mamba_chunk_scan_combined",
        (modeling_bamba, "causal_conv1d_fn"): "causal_conv1d_fn",
    }
    if fused:
        changes[modeling_bamba, "mamba2_split_conv1d_scan_combined"] = "mamba_split_conv1d_scan_combined"
    CALLS.clear()
    with pytest.MonkeyPatch.context() as patch:
        for (file, name), kernel in changes.items():
            stock = getattr(file, name).__wrapped__
            patch.setattr(file, name, use_kernel_func_from_hub_with_fallback(kernel, __name__)(stock))
        yield CALLS
