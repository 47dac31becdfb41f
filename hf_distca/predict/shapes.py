"""Shapes of models: what a model computes besides core attention, per token."""

from collections.abc import Mapping
from dataclasses import dataclass

from hf_distca.plan import AttentionKind

CHUNK = 64
"""Rows that kernels of recurrences compute at once, by matrices."""
STATE_BYTES = 4
"""Bytes of a number of a state, which stays in float32."""


@dataclass(frozen=True)
class MixingShape:
    """Sizes of layers that mix rows in order, in the mean of a model's mixing modules."""

    layers: int  # mixing modules
    before: int  # active parameters of matrices before a module's convolution
    # Active parameters after its recurrence; those of the MLP too, in a layer without attention.
    after: int
    channels: int  # of the convolution
    width: int  # rows before a row that the convolution reads
    heads: int = 0  # of the recurrence; 0 without one
    state: tuple[int, int] = (0, 0)  # rows and columns of a head's state
    # A state changes by a matrix for each row (gated delta rule); else by a decay (Mamba-2).
    delta_rule: bool = False

    @property
    def state_bytes(self) -> int:
        """Bytes of A and B of a segment."""
        rows, columns = self.state
        return STATE_BYTES * self.heads * (rows * columns + (rows * rows if self.delta_rule else 1))

    @property
    def operations(self) -> tuple[int, int]:
        """Multiplications of a token in the convolution and recurrence, and further ones for r and A."""
        rows, columns = self.state
        convolution = self.channels * (self.width + 1)
        if not self.delta_rule:  # rows of a chunk times rows; into the state, and out of it
            return convolution + self.heads * (
                CHUNK * columns + 2 * rows * columns
            ), self.heads * rows * columns
        # Three products of keys and queries within a chunk, two with values; three with the state.
        within, columns_of_values = 3 * CHUNK * rows, 2 * CHUNK + 3 * rows
        return (
            convolution + self.heads * (within + columns * columns_of_values),
            self.heads * rows * columns_of_values,
        )

    @property
    def touched(self) -> tuple[int, int]:
        """Numbers that a token reads and writes in the convolution and recurrence, and further ones for r and A.

        Kernels write a state for each chunk and read it again.
        """
        rows, columns = self.state
        convolution = 2 * self.channels
        if not self.delta_rule:
            return convolution + self.heads * (
                3 * columns + 2 * rows * columns // CHUNK
            ), 3 * self.heads * columns
        # Values, values of a chunk without its keys' part (made, read, and made anew with the
        # state), and outputs.
        of_values = 6 + 2 * rows // CHUNK
        return convolution + self.heads * (
            4 * rows + columns * of_values
        ), self.heads * rows * of_values


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder that determine the time of a step."""

    layers: Mapping[AttentionKind, int]  # of each kind of attention
    hidden: int  # width of the hidden state
    # Active parameters of a layer's matrices before core attention (Q, K and V projections).
    before: int
    # Active parameters of a layer's matrices after core attention (output projection, MLP or
    # experts).
    after: int
    head: int
    parameters: int
    mixing: MixingShape | None = None  # None without layers that mix rows in order

    @property
    def depth(self) -> int:
        """Number of layers with attention."""
        return sum(self.layers.values())

    @property
    def operations(self) -> int:
        """Multiplications of a token besides core attention."""
        mixing = self.mixing
        of_mixing = (
            mixing.layers * (mixing.before + mixing.after + mixing.operations[0]) if mixing else 0
        )
        return self.depth * (self.before + self.after) + self.head + of_mixing

    @classmethod
    def llama(
        cls,
        layers: int,
        hidden: int,
        mlp: int,
        q_heads: int,
        kv_heads: int,
        vocabulary: int,
        head_dim: int = 128,
    ) -> "ModelShape":
        """Return the shape of a LLaMA-like model.

        `mlp` is the width of an MLP of three matrices.
        """
        before, output = hidden * (q_heads + 2 * kv_heads) * head_dim, hidden * q_heads * head_dim
        after, head = output + 3 * hidden * mlp, hidden * vocabulary
        kind = AttentionKind(None, q_heads, kv_heads, head_dim, head_dim)
        return cls(
            {kind: layers}, hidden, before, after, head, layers * (before + after) + 2 * head
        )


LLAMA_8B = ModelShape.llama(32, 4096, 14336, 32, 8, 128256)
"""Llama-3-8B."""
LLAMA_34B = ModelShape.llama(48, 8192, 22016, 64, 16, 128256)
"""The 34B model of the paper, with the vocabulary of Llama 3."""
MODELS = {"llama-8b": LLAMA_8B, "llama-34b": LLAMA_34B}
