"""CALL and REPLY: which core attention of which layer a rank asks for, and which tensors travel with it and back.

Forward: q, k, v go to the server, o and lse come back. Backward: q, do, o, lse, k, v go, dq, dk, dv come back. Each
tensor travels whole, one after another. Rows of the queries' kind are in the order of `Routes.queries`, rows of the
keys' kind in that of `Routes.keys`; results are in the order of the rows that they belong to.
"""

from dataclasses import asdict, dataclass
from typing import Any, cast, get_args

from hf_distca.plan import AttentionKind, Direction
from hf_distca.pool.messages.fields import Fields
from hf_distca.pool.messages.tensor_spec import ITEM_BYTES, TensorSpec

HEAD_LIMIT = 1024
"""Heads of a layer, and numbers of a head, at most."""


@dataclass(frozen=True)
class Call:
    """One core attention: the same header from every rank that has rows for it.

    Attributes:
        plan_id: of the plan.
        call_id: every rank gives the same id to the same call, and larger ones to later calls.
        nano_batch: index of the plan's nano-batch.
        window: the layer's attention window; None: full attention.
        direction: forward or backward.
        scale: factor on the scores.
        softcap: as in `AttentionParams`.
        q_heads: query heads.
        kv_heads: key-value heads, which divide the query heads.
        dim_qk: numbers of a head of queries and keys.
        dim_v: numbers of a head of values.
        dtype: name of the tensors' dtype; lse is float32, or float64 where this is.
        chunk: rows of the layer's attention chunks; None: no chunks.
    """

    plan_id: int
    call_id: int
    nano_batch: int
    window: int | None
    direction: Direction
    scale: float
    softcap: float | None
    q_heads: int
    kv_heads: int
    dim_qk: int
    dim_v: int
    dtype: str
    chunk: int | None = None

    def header(self) -> dict[str, Any]:
        """As a message's header."""
        return asdict(self)

    @classmethod
    def read(cls, header: dict[str, Any]) -> "Call":
        """From a message's header.

        Raises:
            ProtocolError: something is missing, of the wrong type or out of range.
        """
        fields = Fields("a call", header)
        call = cls(
            plan_id=fields.whole("plan_id"),
            call_id=fields.whole("call_id"),
            nano_batch=fields.whole("nano_batch", 0, 2**16),
            window=fields.whole_or_none("window", 1),
            direction=cast(Direction, fields.one_of("direction", get_args(Direction))),
            scale=fields.real("scale"),
            softcap=fields.real_or_none("softcap", positive=True),
            q_heads=fields.whole("q_heads", 1, HEAD_LIMIT),
            kv_heads=fields.whole("kv_heads", 1, HEAD_LIMIT),
            dim_qk=fields.whole("dim_qk", 1, HEAD_LIMIT),
            dim_v=fields.whole("dim_v", 1, HEAD_LIMIT),
            dtype=fields.one_of("dtype", ITEM_BYTES),
            chunk=fields.whole_or_none("chunk", 1),
        )
        fields.require(call.q_heads % call.kv_heads == 0, "kv_heads", f"a divisor of q_heads={call.q_heads}")
        return call

    @property
    def kind(self) -> AttentionKind:
        """The layer's kind of attention."""
        return AttentionKind(self.window, self.q_heads, self.kv_heads, self.dim_qk, self.dim_v, self.chunk)

    def request(self) -> tuple[TensorSpec, ...]:
        """What a rank sends."""
        q, k, v, o, lse = self._tensors()
        if self.direction == "forward":
            return q, k, v
        return q, TensorSpec("do", o.rows, o.shape, o.dtype), o, lse, k, v

    def reply(self) -> tuple[TensorSpec, ...]:
        """What it gets back."""
        q, k, v, o, lse = self._tensors()
        if self.direction == "forward":
            return o, lse
        return tuple(TensorSpec(f"d{like.name}", like.rows, like.shape, like.dtype) for like in (q, k, v))

    def _tensors(self) -> tuple[TensorSpec, TensorSpec, TensorSpec, TensorSpec, TensorSpec]:
        wide = "float64" if self.dtype == "float64" else "float32"
        return (
            TensorSpec("q", "queries", (self.q_heads, self.dim_qk), self.dtype),
            TensorSpec("k", "keys", (self.kv_heads, self.dim_qk), self.dtype),
            TensorSpec("v", "keys", (self.kv_heads, self.dim_v), self.dtype),
            TensorSpec("o", "queries", (self.q_heads, self.dim_v), self.dtype),
            TensorSpec("lse", "queries", (self.q_heads,), wide),
        )


@dataclass(frozen=True)
class Reply:
    """What a server says beside the results of a call, to every rank that made it.

    Attributes:
        call_id: of the call.
        seconds: time that the call's tasks took, by the server's clock.
        pairs: query-key pairs of these tasks.
    """

    call_id: int
    seconds: float
    pairs: int

    def header(self) -> dict[str, Any]:
        """As a message's header."""
        return asdict(self)

    @classmethod
    def read(cls, header: dict[str, Any]) -> "Reply":
        """From a message's header.

        Raises:
            ProtocolError: something is missing, of the wrong type or out of range.
        """
        fields = Fields("a reply", header)
        return cls(call_id=fields.whole("call_id"), seconds=fields.real("seconds"), pairs=fields.whole("pairs"))
