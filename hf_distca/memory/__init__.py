"""Prediction of the device memory that a training step takes."""

from typing import Literal

Strategy = Literal["ddp", "fsdp2", "zero1", "zero2", "zero3"]
STRATEGIES: tuple[Strategy, ...] = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
"""How ranks share weights, gradients and optimizer."""
