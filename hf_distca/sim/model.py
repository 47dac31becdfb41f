"""Shapes of models: what a model computes besides core attention, per token."""

from collections.abc import Mapping
from dataclasses import dataclass

from hf_distca.plan import AttentionKind


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder that determine the time of a step.

    Attributes:
        layers: number of layers of each kind of attention.
        hidden: width of the hidden state.
        before: active parameters of a layer's matrices before core attention (Q, K and V projections).
        after: active parameters of a layer's matrices after core attention (output projection, MLP or experts).
    """

    layers: Mapping[AttentionKind, int]
    hidden: int
    before: int
    after: int
    head: int
    parameters: int

    @property
    def depth(self) -> int:
        """Number of layers."""
        return sum(self.layers.values())

    @classmethod
    def llama(
        cls, layers: int, hidden: int, mlp: int, q_heads: int, kv_heads: int, vocabulary: int, head_dim: int = 128
    ) -> "ModelShape":
        """Return the shape of a LLaMA-like model.

        Args:
            mlp: width of an MLP of three matrices.
            vocabulary: rows of the embedding and of the output head.
        """
        before, output = hidden * (q_heads + 2 * kv_heads) * head_dim, hidden * q_heads * head_dim
        after, head = output + 3 * hidden * mlp, hidden * vocabulary
        kind = AttentionKind(None, q_heads, kv_heads, head_dim, head_dim)
        return cls({kind: layers}, hidden, before, after, head, layers * (before + after) + 2 * head)


LLAMA_8B = ModelShape.llama(32, 4096, 14336, 32, 8, 128256)
"""Llama-3-8B."""
LLAMA_34B = ModelShape.llama(48, 8192, 22016, 64, 16, 128256)
"""The 34B model of the paper, with the vocabulary of Llama 3."""
MODELS = {"llama-8b": LLAMA_8B, "llama-34b": LLAMA_34B}
