"""How often kernels run: once for all whole documents where they take packed ones, with the same
results.

Stand-ins for kernels of flash-linear-attention, mamba-ssm and causal-conv1d have their signatures,
and count calls.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.bamba import modeling_bamba
from transformers.models.qwen3_next import modeling_qwen3_next

from tests.mixing.steps import Step, assert_equal, reference, step
from tests.mixing.test_cut_documents import LENGTHS, PLANS
from tests.mixing.test_prefix_trees import (
    ALONE,
    EXACT,
    Errors,
    alone,
    in_trees,
    plans_of,
    rows_of_rank,
)

CALLS: list[tuple[str, int]] = []
"""Name of the kernel and number of documents, of each call."""

_rule = modeling_qwen3_next.torch_chunk_gated_delta_rule.__wrapped__
_scan = modeling_bamba.mamba2_chunk_scan.__wrapped__
_convolution = modeling_bamba.causal_conv1d_fn.__wrapped__


def chunk_gated_delta_rule(
    q,
    k,
    v,
    g,
    beta,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
):
    sizes = [q.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
    CALLS.append(("delta rule", len(sizes)))
    states = [None] * len(sizes) if initial_state is None else initial_state.split(1)
    options = {
        "output_final_state": output_final_state,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
    }
    results = [
        _rule(q_, k_, v_, g=g_, beta=b_, initial_state=state, **options)
        for *rows, state in zip(
            *(x.split(sizes, 1) for x in (q, k, v, g, beta)), states, strict=True
        )
        for q_, k_, v_, g_, b_ in [rows]
    ]
    finals = torch.cat([final for _, final in results]) if output_final_state else None
    return torch.cat([out for out, _ in results], 1), finals


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
    sizes = [x.shape[1]] if seq_idx is None else torch.bincount(seq_idx[0]).tolist()
    CALLS.append(("scan", len(sizes)))
    assert len(sizes) == 1 or not return_final_states
    options = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
    results = [
        _scan(x_, dt_, A, B_, C_, chunk_size, return_final_states=return_final_states, **options)
        for x_, dt_, B_, C_ in zip(
            *(tensor.split(sizes, 1) for tensor in (x, dt, B, C)), strict=True
        )
    ]
    return results[0] if return_final_states else torch.cat(results, 1)


def causal_conv1d_fn(x, weight, bias=None, activation=None):
    CALLS.append(("convolution", 1))
    return _convolution(x, weight, bias, activation)


def mamba_split_conv1d_scan_combined(
    zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, seq_idx=None, outproj_weight=None
):
    """Gives back the gate's rows, and adds nothing of other documents."""
    CALLS.append(("whole module", 1 if seq_idx is None else int(seq_idx.max()) + 1))
    return zxbcdt[..., : outproj_weight.shape[0]]


KERNELS = {
    "torch_chunk_gated_delta_rule": (modeling_qwen3_next, "chunk_gated_delta_rule"),
    "mamba2_chunk_scan": (modeling_bamba, "mamba_chunk_scan_combined"),
    "mamba2_split_conv1d_scan_combined": (modeling_bamba, "mamba_split_conv1d_scan_combined"),
}
MODELS = {"qwen3_next": "delta rule", "bamba": "scan"}
SHORT = [1, 12, 7, 30, 2]


@contextmanager
def _installed(*names: str) -> Iterator[None]:
    """Kernels of these functions as if they had been installed when transformers was imported."""
    CALLS.clear()
    changes = [(*KERNELS[name], name) for name in names]
    changes += [
        (file, "causal_conv1d_fn", "causal_conv1d_fn")
        for file in (modeling_qwen3_next, modeling_bamba)
    ]
    with pytest.MonkeyPatch.context() as patch:
        for file, kernel, name in changes:
            stock = getattr(file, name).__wrapped__
            patch.setattr(
                file, name, use_kernel_func_from_hub_with_fallback(kernel, __name__)(stock)
            )
        yield


def _step(model_type: str, cut: bool, *names: str) -> tuple[Step, list[tuple[str, int]]]:
    """A step with the kernels of these functions, and their calls."""
    with _installed(*names):
        if cut:
            return step(model_type, LENGTHS, PLANS[2], document_layout="fixed"), CALLS
        return step(model_type, SHORT, ping_pong=False), CALLS


def _errors_in_trees(model_type: str) -> tuple[Errors, list[tuple[str, int]]]:
    """Errors of a step of prefix trees with kernels of recurrences, and the calls of these."""
    hidden, gradients = alone(model_type)
    with _installed(*RECURRENCES):
        found = in_trees(model_type, ALONE)
    return Errors.of(found, (rows_of_rank(hidden, plans_of(ALONE)), gradients)), CALLS


RECURRENCES = tuple(KERNELS)[:2]


@pytest.mark.parametrize("model_type", MODELS)
def test_packed_segments_take_one_call(rank_pools, model_type):
    kernel = MODELS[model_type]
    ((got, calls),) = rank_pools[1].run(_step, model_type, False, *RECURRENCES)
    # One layer of each kind; the convolution runs on all documents at once.
    assert calls == [("convolution", 1), (kernel, 5)]
    assert_equal(got, reference(model_type, SHORT))
    first, second = rank_pools[2].run(_step, model_type, True, *RECURRENCES)
    # For each nano-batch a convolution. Its whole documents take one call, and so do the first
    # segments of its documents, if the kernel returns the state of each. Further segments take one
    # call each.
    first_segments = {(kernel, 1): 3 + 1, (kernel, 2): 1}
    if model_type == "bamba":
        first_segments = {(kernel, 1): 3 + 3}
    assert Counter(first[1]) == {("convolution", 1): 2, **first_segments}
    assert Counter(second[1]) == {("convolution", 1): 2, (kernel, 1): 4}
    for got, _ in (first, second):
        assert_equal(got, reference(model_type, LENGTHS))
    # Without kernels.
    ((got, calls),) = rank_pools[1].run(_step, model_type, False)
    assert calls == [("convolution", 1)]
    assert_equal(got, reference(model_type, SHORT))


@pytest.mark.parametrize("model_type", MODELS)
def test_branches_at_the_same_depth_take_one_call(rank_pools, model_type):
    ((errors, calls),) = rank_pools[1].run(_errors_in_trees, model_type)
    assert max(errors.hidden, errors.gradients) < EXACT
    kernel = MODELS[model_type]
    of_kernel = {(kernel, 1): 10}
    if model_type == "qwen3_next":
        # By nano-batch: a root, a tree of one document, a branch with branches, and two pairs of
        # leaves; a root and a pair of leaves.
        of_kernel = {(kernel, 1): 3 + 1, (kernel, 2): 2 + 1}
    assert Counter(calls) == {("convolution", 1): 2, **of_kernel}


def test_a_kernel_for_the_whole_module_gets_all_documents_unless_some_are_cut(rank_pools):
    ((_, calls),) = rank_pools[1].run(_step, "bamba", False, *KERNELS)
    assert calls == [("whole module", 5)]
    for got, calls in rank_pools[2].run(_step, "bamba", True, *KERNELS):
        assert "whole module" not in dict(calls)
        assert_equal(got, reference("bamba", LENGTHS))
