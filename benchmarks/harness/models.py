"""Models with random weights, the rows that a rank runs them on, and core attention without
hf_distca around it.

Shape suffixes: T rows, H query heads, G key/value heads, D head dim.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from hf_distca import DistCAConfig, PlanSettings, describe_run
from hf_distca.kernels import AttentionParams, Kernel, TaskShapes
from hf_distca.plan import MicroBatchPlan

VOCABULARY = 1024
QUARTER_OF_600M = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
"""A quarter of the width of a Qwen3-0.6B."""


def llama(
    positions: int, implementation: str = "distca", dtype: torch.dtype = torch.float32, **sizes: Any
) -> nn.Module:
    """A LLaMA with random weights, the same every time, of these sizes or of the usual ones."""
    usual = {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(
        **{"vocab_size": VOCABULARY, **(sizes or usual)},
        max_position_embeddings=positions,
        attn_implementation=implementation,
        use_cache=False,
        dtype=dtype,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(dtype).train()


def hybrid(positions: int, implementation: str = "distca") -> nn.Module:
    """A Qwen3.5 with random weights, the same every time.

    It has a quarter of the width of a Qwen3.5-0.8B, a layer with a gated delta rule, and one with
    attention.
    """
    config = AutoConfig.for_model(
        "qwen3_5_text",
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=896,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=256,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        max_position_embeddings=positions,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=implementation, dtype=torch.float32
    )
    return model.train()


def settings_of(
    model: nn.Module, ranks: int, tokens: int, device: torch.device, **config: Any
) -> PlanSettings:
    options = DistCAConfig(tokens_per_rank=tokens, **config)
    return describe_run(model, options, ranks=ranks, device=device, dtype=model.dtype).plans


def document_lengths(positions: Tensor) -> tuple[int, ...]:
    """Lengths of the documents of a packed row, which begin where positions [T] are 0."""
    starts = torch.nonzero(positions == 0).flatten().tolist()
    return tuple(
        stop - start for start, stop in zip(starts, [*starts[1:], len(positions)], strict=True)
    )


def documents_of(lengths: Sequence[int], vocabulary: int = VOCABULARY) -> list[Tensor]:
    """Token ids [length] of each document on the CPU, the same every time."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocabulary, (length,), generator=generator) for length in lengths]


def rows_of_documents(documents: Sequence[Tensor], device: torch.device) -> dict[str, Tensor]:
    """Batch of a rank that holds whole documents; targets are shifted within each document."""
    return _columns([(document, 0, len(document)) for document in documents], device)


def rows_of_rank(
    plan: MicroBatchPlan, rank: int, documents: Sequence[Tensor], device: torch.device
) -> dict[str, Tensor]:
    """Batch of a rank of a plan of documents, which are [length] token ids each."""
    segments = [
        (documents[nano.documents[index]], start, stop)
        for nano in plan.nano_batches
        for index, start, stop, _, _ in nano.layout.of_rank(rank).tolist()
    ]
    return _columns(segments, device)


def _columns(
    segments: Sequence[tuple[Tensor, int, int]], device: torch.device
) -> dict[str, Tensor]:
    """Columns [1, T] of rows [start, stop) of documents, one after another."""
    rows = [document[start:stop] for document, start, stop in segments]
    positions = [torch.arange(start, stop) for _, start, stop in segments]
    targets = [
        torch.cat([document[1:], torch.tensor([-100])])[start:stop]
        for document, start, stop in segments
    ]
    columns = {
        "input_ids": rows,
        "position_ids": positions,
        "labels": targets,
        "shift_labels": targets,
    }
    return {name: torch.cat(parts)[None].to(device) for name, parts in columns.items()}


class KernelNode(torch.autograd.Function):
    """A kernel as one autograd node, with nothing around it: what attention costs without
    hf_distca.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kernel: Kernel,
        shapes: TaskShapes,
        params: AttentionParams,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
    ) -> Tensor:
        o_THD, lse_TH = kernel.forward(q_THD, k_TGD, v_TGD, shapes, params)
        ctx.save_for_backward(q_THD, k_TGD, v_TGD, o_THD, lse_TH)
        ctx.kernel = kernel
        ctx.shapes = shapes
        ctx.params = params
        return o_THD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_THD: Tensor) -> tuple[Tensor | None, ...]:
        return (
            None,
            None,
            None,
            *ctx.kernel.backward(do_THD, *ctx.saved_tensors, ctx.shapes, ctx.params),
        )


def attend_packed(
    kernel: Kernel, shapes: TaskShapes, scaling: float, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, None]:
    """Causal attention within each document of a packed row, as transformers' layers ask for it: Q
    [1, H, T, D].
    """
    qkv = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    return KernelNode.apply(kernel, shapes, AttentionParams(scale=scaling), *qkv).unsqueeze(0), None


class PlainAttention:
    """Core attention of a rank's own documents, packed, in one kernel call: what a plan is to be
    better than.

    Models of attention implementation `name` take the lengths of the documents under the keyword
    `plain_shapes`.
    """

    def __init__(self, name: str, kernel: Kernel) -> None:
        self._kernel = kernel
        AttentionInterface.register(name, self._attention)

    def _attention(
        self,
        _module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _mask: Tensor | None,
        *,
        scaling: float,
        plain_shapes: TaskShapes,
        **_: Any,
    ) -> tuple[Tensor, None]:
        return attend_packed(self._kernel, plain_shapes, scaling, query, key, value)
