"""Devices of launched ranks, and the connection between them.

Imports torch, and nothing that takes seconds more.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from hf_distca.dispatch.process_groups import Groups


def device_of_rank() -> torch.device:
    """Return the device of this process: the GPU of its local rank, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def connect(device: torch.device, timeout: float) -> Groups | None:
    """Connect the launched ranks.

    Return None in a process without a local rank, or launched alone.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1" or "LOCAL_RANK" not in os.environ:
        return None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout)
    )
    return Groups(device, timeout)
