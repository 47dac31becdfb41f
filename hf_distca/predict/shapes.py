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
    before_mixing: int  # active parameters of matrices before a module's convolution
    # Active parameters after its recurrence; those of the MLP too, in a layer without attention.
    after_mixing: int
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
        """Multiplications of a token in the convolution and recurrence, and further ones.

        The further ones compute r and A, which only segments with earlier segments need.
        """
        rows, columns = self.state
        convolution = self.channels * (self.width + 1)
        if self.delta_rule:
            # Three products of keys and queries within a chunk.
            keys_in_chunk = 3 * CHUNK * rows
            # Of each column of values: two products within a chunk, and three with the state.
            value_column = 2 * CHUNK + 3 * rows
            recurrence = keys_in_chunk + columns * value_column
            # r and A take further columns of values, as many as a state has rows.
            continued = rows * value_column
        else:
            # Rows of a chunk times rows, then into the state and out of it.
            recurrence = CHUNK * columns + 2 * rows * columns
            continued = rows * columns
        return convolution + self.heads * recurrence, self.heads * continued

    @property
    def touched(self) -> tuple[int, int]:
        """Numbers that a token reads and writes in convolution and recurrence, and in r and A.

        Kernels write a state for each chunk and read it again.
        """
        rows, columns = self.state
        convolution = 2 * self.channels
        if self.delta_rule:
            # Values, values of a chunk without its keys' part (made, read, and made anew with the
            # state), and outputs.
            value_column = 6 + 2 * rows // CHUNK
            recurrence = 4 * rows + columns * value_column
            continued = rows * value_column
        else:
            recurrence = 3 * columns + 2 * rows * columns // CHUNK
            continued = 3 * columns
        return convolution + self.heads * recurrence, self.heads * continued


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder that determine the time of a step."""

    layers: Mapping[AttentionKind, int]  # of each kind of attention
    hidden: int  # width of the hidden state
    # Active parameters of a layer's matrices before core attention (Q, K and V projections).
    before_attention: int
    # Active parameters of a layer's matrices after core attention (output projection, MLP or
    # experts).
    after_attention: int
    head: int  # active parameters of the output head
    parameters: int  # of the whole model
    mixing: MixingShape | None = None  # None without layers that mix rows in order

    @property
    def depth(self) -> int:
        """Number of layers with attention."""
        return sum(self.layers.values())

    @property
    def operations(self) -> int:
        """Multiplications of a token besides core attention."""
        attention_layers = self.depth * (self.before_attention + self.after_attention)
        mixing_layers = 0
        mixing = self.mixing
        if mixing is not None:
            recurrence, _ = mixing.operations
            mixing_layers = mixing.layers * (
                mixing.before_mixing + mixing.after_mixing + recurrence
            )
        return attention_layers + self.head + mixing_layers

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
        projections = hidden * (q_heads + 2 * kv_heads) * head_dim
        output = hidden * q_heads * head_dim
        after_attention = output + 3 * hidden * mlp
        head = hidden * vocabulary
        kind = AttentionKind(
            window=None, q_heads=q_heads, kv_heads=kv_heads, dim_qk=head_dim, dim_v=head_dim
        )
        return cls(
            layers={kind: layers},
            hidden=hidden,
            before_attention=projections,
            after_attention=after_attention,
            head=head,
            # The embedding is as large as the head.
            parameters=layers * (projections + after_attention) + 2 * head,
        )


LLAMA_8B = ModelShape.llama(32, 4096, 14336, 32, 8, 128256)
"""Llama-3-8B."""
LLAMA_34B = ModelShape.llama(48, 8192, 22016, 64, 16, 128256)
"""The 34B model of the paper, with the vocabulary of Llama 3."""
MODELS = {"llama-8b": LLAMA_8B, "llama-34b": LLAMA_34B}
