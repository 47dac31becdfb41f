"""The CALL message: which core attention of which layer it is about, and which tensors travel with it.

Forward: q, k, v go to the server, o and lse come back. Backward: q, do, o, lse, k, v go, dq, dk, dv come back. Each
column travels whole, one after another. Rows of the queries' kind are in the order of `Routes.queries`, rows of the
keys' kind in that of `Routes.keys`; results are in the order of the rows that they belong to.
"""

from dataclasses import asdict, dataclass
from typing import Any

from hf_distca.dispatch.schedule import Direction
from hf_distca.plan import AttentionKind
from hf_distca.pool.messages.tensor_spec import ITEM_BYTES, TensorSpec

HEAD_LIMIT = 1024
"""Heads of a layer, and numbers of a head, at most."""


@dataclass(frozen=True)
class Call:
    """One core attention: the same header from every trainer that has rows for it.

    Attributes:
        plan: number of the plan.
        number: of the call; every trainer gives the same number to the same call, and larger ones to later calls.
        nano: which nano-batch of the plan.
        window: the layer's attention window; None: full attention.
        direction: forward or backward.
        scale: factor on the scores.
        softcap: as in `AttentionParams`.
        q_heads: query heads.
        kv_heads: key-value heads, which divide the query heads.
        dim_qk: numbers of a head of queries and keys.
        dim_v: numbers of a head of values.
        dtype: name of the tensors' dtype; lse is float32, or float64 where this is.
    """

    plan: int
    number: int
    nano: int
    window: int | None
    direction: Direction
    scale: float
    softcap: float | None
    q_heads: int
    kv_heads: int
    dim_qk: int
    dim_v: int
    dtype: str

    def header(self) -> dict[str, Any]:
        """The call as a message's header."""
        return asdict(self)

    @property
    def kind(self) -> AttentionKind:
        """The layer's kind of attention."""
        return AttentionKind(self.window, self.q_heads, self.kv_heads, self.dim_qk, self.dim_v)

    @classmethod
    def read(cls, header: dict[str, Any]) -> "Call":
        """A call from a message's header.

        Raises:
            ValueError: something is missing, of the wrong type or out of range.
        """
        values: dict[str, Any] = {name: header.get(name) for name in cls.__dataclass_fields__}
        call = cls(**values)
        heads = _whole(call.q_heads, 1, HEAD_LIMIT) and _whole(call.kv_heads, 1, HEAD_LIMIT)
        rules = {
            "plan": _whole(call.plan, 0, 2**62),
            "number": _whole(call.number, 0, 2**62),
            "nano": _whole(call.nano, 0, 2**16),
            "window": call.window is None or _whole(call.window, 1, 2**62),
            "direction": call.direction in ("forward", "backward"),
            "scale": _real(call.scale),
            "softcap": call.softcap is None or (_real(call.softcap) and call.softcap > 0),
            "q_heads": _whole(call.q_heads, 1, HEAD_LIMIT),
            "kv_heads": heads and call.q_heads % call.kv_heads == 0,
            "dim_qk": _whole(call.dim_qk, 1, HEAD_LIMIT),
            "dim_v": _whole(call.dim_v, 1, HEAD_LIMIT),
            "dtype": isinstance(call.dtype, str) and call.dtype in ITEM_BYTES,
        }
        for name, good in rules.items():
            if not good:
                raise ValueError(f"{name} of a call is {header.get(name)!r:.40}, which is not possible")
        return call

    def request(self) -> tuple[TensorSpec, ...]:
        """What a trainer sends."""
        q, k, v, o, lse = self._columns()
        if self.direction == "forward":
            return q, k, v
        return q, TensorSpec("do", o.rows, o.shape, o.dtype), o, lse, k, v

    def reply(self) -> tuple[TensorSpec, ...]:
        """What it gets back."""
        q, k, v, o, lse = self._columns()
        if self.direction == "forward":
            return o, lse
        return tuple(TensorSpec(f"d{like.name}", like.rows, like.shape, like.dtype) for like in (q, k, v))

    def _columns(self) -> tuple[TensorSpec, TensorSpec, TensorSpec, TensorSpec, TensorSpec]:
        wide = "float64" if self.dtype == "float64" else "float32"
        return (
            TensorSpec("q", "queries", (self.q_heads, self.dim_qk), self.dtype),
            TensorSpec("k", "keys", (self.kv_heads, self.dim_qk), self.dtype),
            TensorSpec("v", "keys", (self.kv_heads, self.dim_v), self.dtype),
            TensorSpec("o", "queries", (self.q_heads, self.dim_v), self.dtype),
            TensorSpec("lse", "queries", (self.q_heads,), wide),
        )


def _whole(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _real(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= 1e30  # NaN is not
