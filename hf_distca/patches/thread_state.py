"""Thread state that two nano-batches of a layer share: each restores its own when it goes on."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class ThreadState:
    """Settings that contexts such as `torch.autocast` and `torch.no_grad` make for a thread."""

    device_type: str
    autocast: bool
    autocast_dtype: torch.dtype
    grad: bool
    default_dtype: torch.dtype
    saved_tensors: Any

    @staticmethod
    def now(device_type: str) -> "ThreadState":
        """Return the current state."""
        return ThreadState(
            device_type,
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch._C._autograd._top_saved_tensors_default_hooks(True),
        )

    def inside(self) -> "ThreadState":
        """Return the state of a nano-batch that is about to pause; self is the state around its layer.

        Raises:
            ValueError: a checkpoint or offloading context inside the layer is open: it would also take the other
                nano-batch's saved tensors.
        """
        inside = ThreadState.now(self.device_type)
        if inside.saved_tensors != self.saved_tensors:
            raise ValueError(
                "ping-pong cannot pause inside a checkpoint, or a context that handles saved tensors, which a decoder "
                "layer has around its attention; put it around the whole layer, or set ping_pong=False"
            )
        return inside

    def restore(self) -> None:
        """Restore the thread's state, except for saved-tensor hooks, which are the same across a pause."""
        if torch.is_autocast_enabled(self.device_type) != self.autocast:
            torch.set_autocast_enabled(self.device_type, self.autocast)
        if torch.get_autocast_dtype(self.device_type) != self.autocast_dtype:
            torch.set_autocast_dtype(self.device_type, self.autocast_dtype)
        if torch.is_grad_enabled() != self.grad:
            torch.set_grad_enabled(self.grad)
        if torch.get_default_dtype() != self.default_dtype:
            torch.set_default_dtype(self.default_dtype)
