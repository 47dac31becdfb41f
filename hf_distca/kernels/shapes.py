"""How many rows the tasks of one kernel call have. T tasks."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_Made = TypeVar("_Made")


@dataclass(frozen=True, eq=False)
class TaskShapes:
    """Lengths of the tasks of one kernel call, on the host and on the device.

    The query rows of the tasks lie packed one after another, and so do their key/value rows: a key/value
    row that two tasks need appears twice. Build it once per micro-batch with `TaskShapes.build`.

    Attributes:
        q_lens: query rows of each task; may be 0.
        k_lens: key/value rows of each task; may be 0. With causal attention k_lens[i] >= q_lens[i].
        cu_q: [T + 1] int32 on the device, first packed query row of each task, then the total.
        cu_k: [T + 1] int32 on the device, likewise for key/value rows.
        max_q: largest of q_lens, 0 without tasks.
        max_k: largest of k_lens, 0 without tasks.
    """

    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    _made: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def once(self, key: Hashable, make: Callable[[], _Made]) -> _Made:
        """What `make` gave when it was first called for this key: every layer of a micro-batch asks for the same.

        Args:
            key: what is made, and for whom.
            make: makes it.
        """
        if key not in self._made:
            self._made[key] = make()
        made: _Made = self._made[key]
        return made

    @staticmethod
    def build(q_lens: Sequence[int], k_lens: Sequence[int], device: torch.device | str) -> "TaskShapes":
        """Make the shapes of tasks with the given numbers of query and key/value rows.

        Args:
            q_lens: query rows of each task.
            k_lens: key/value rows of each task.
            device: where the kernel will run.

        Raises:
            ValueError: the two differ in number, or a length is negative.
        """
        return TaskShapes.placed(
            q_lens, k_lens, lambda numbers: torch.from_numpy(numbers).to(device, non_blocking=True)
        )

    @staticmethod
    def placed(
        q_lens: Sequence[int], k_lens: Sequence[int], place: Callable[[NDArray[np.int32]], Tensor]
    ) -> "TaskShapes":
        """The same with `place` to take numbers to the device: one that gathers many can send them together."""
        q_lens, k_lens = tuple(map(int, q_lens)), tuple(map(int, k_lens))
        if len(q_lens) != len(k_lens):
            raise ValueError(f"got {len(q_lens)} q_lens but {len(k_lens)} k_lens; give one of each per task")
        if any(n < 0 for n in q_lens + k_lens):
            raise ValueError(f"lengths must be 0 or more, got q_lens {q_lens} and k_lens {k_lens}")

        def cumulative(lens: tuple[int, ...]) -> Tensor:
            return place(np.array([0, *accumulate(lens)], np.int32))

        cu_q = cumulative(q_lens)
        return TaskShapes(
            q_lens=q_lens,
            k_lens=k_lens,
            cu_q=cu_q,
            cu_k=cu_q if k_lens == q_lens else cumulative(k_lens),
            max_q=max(q_lens, default=0),
            max_k=max(k_lens, default=0),
        )
