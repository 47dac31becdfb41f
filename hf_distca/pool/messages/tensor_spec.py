"""What a tensor is that travels with a call or its reply."""

import math
from dataclasses import dataclass
from typing import Literal

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
"""Names of the dtypes that may travel, and bytes of a number."""

RowsOf = Literal["queries", "keys"]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a call or a reply.

    Attributes:
        name: as in the kernel contract.
        rows: which rows it has.
        shape: of one row.
        dtype: name of its dtype.
    """

    name: str
    rows: RowsOf
    shape: tuple[int, ...]
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]
