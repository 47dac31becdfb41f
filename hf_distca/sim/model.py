"""What a model computes besides core attention, as numbers per token."""

from collections.abc import Mapping
from dataclasses import dataclass

from hf_distca.plan import AttentionKind


@dataclass(frozen=True)
class ModelShape:
    """A decoder as a step's time sees it.

    Attributes:
        layers: how many layers have each kind of attention.
        hidden: numbers of a token between layers.
        before: weights of a layer's matrices before core attention (Q, K and V projections) that a token meets.
        after: those behind it (output projection, MLP; of experts only those that a token goes to).
        head: weights of the output head.
        parameters: all of the model's.
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
        """The shape of a LLaMA-like model.

        Args:
            layers: how many.
            hidden: numbers of a token between layers.
            mlp: numbers of a token inside an MLP of three matrices.
            q_heads: query heads.
            kv_heads: key-value heads.
            vocabulary: rows of the embedding and of the output head.
            head_dim: numbers of a head.
        """
        before, output = hidden * (q_heads + 2 * kv_heads) * head_dim, hidden * q_heads * head_dim
        after, head = output + 3 * hidden * mlp, hidden * vocabulary
        kind = AttentionKind(None, q_heads, kv_heads, head_dim, head_dim)
        return cls({kind: layers}, hidden, before, after, head, layers * (before + after) + 2 * head)


LLAMA_8B = ModelShape.llama(32, 4096, 14336, 32, 8, 128256)
"""Llama-3-8B."""
LLAMA_34B = ModelShape.llama(48, 8192, 22016, 64, 16, 128256)
"""The 34B model of the paper; the vocabulary is that of Llama 3."""
MODELS = {"llama-8b": LLAMA_8B, "llama-34b": LLAMA_34B}
