"""The device of this process, its memory and that of the host, and the kernel that "auto" is on it."""

import importlib.util
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from hf_distca.cli.findings.finding import Finding
from hf_distca.kernels import choose_kernel

GB = 1e9
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED = 1 * GB
"""Some hundreds of micro-batches; containers have 64 MB unless told otherwise."""
TAKEN = 0.1
"""Share of a GPU's memory above which others are said to have taken some."""
CGROUP = Path("/sys/fs/cgroup")


def device_of(environment: Mapping[str, str]) -> torch.device:
    """The device that this process trains on: of the host's GPUs that of its number there, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(environment.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def machine_findings(device: torch.device, environment: Mapping[str, str]) -> list[Finding]:
    """Device, memory and kernels."""
    local = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    findings = [device_finding(device, local), *kernel_findings(device), host_memory_finding(_host_memory())]
    if device.type == "cuda":
        findings.append(device_memory_finding(*torch.cuda.mem_get_info(device)))
    if SHARED_MEMORY.is_dir():
        findings.append(shared_memory_finding(shutil.disk_usage(SHARED_MEMORY).free))
    return findings


def device_finding(device: torch.device, processes: int) -> Finding:
    """What this process computes on.

    Args:
        device: of this process.
        processes: on this host.
    """
    if device.type == "cpu":
        if torch.version.cuda is None and Path("/dev/nvidiactl").exists():
            return Finding(
                "device",
                f"cpu, since torch {torch.__version__} was built without CUDA, on a host with an NVIDIA GPU",
                "install a build of torch with CUDA (pytorch.org/get-started)",
                needed=True,
            )
        return Finding("device", f"cpu, {os.cpu_count()} cores")
    properties, count = torch.cuda.get_device_properties(device), torch.cuda.device_count()
    found = f"{properties.name}, compute capability {properties.major}.{properties.minor}, one of {count}"
    if processes > count:
        return Finding(
            "device",
            f"{found}, for {processes} processes on this host",
            "start no more processes on a host than it has GPUs, or all over gloo (ddp_backend='gloo')",
            needed=True,
        )
    return Finding("device", found)


def kernel_findings(device: torch.device) -> list[Finding]:
    """The kernel that attention_kernel="auto" is for most models, and why it is no faster one."""
    try:
        choice = choose_kernel(device)
    except ValueError as error:
        return [Finding("attention_kernel", "none", str(error), needed=True)]
    findings = [Finding("attention_kernel", f"auto is {choice.kernel.name}")]
    findings += [Finding(f"not {name}", why) for name, why in choice.passed_over.items()]
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        findings.append(
            Finding("triton", "not installed", "pip install triton: results of two kernels are merged by it", True)
        )
    return findings


def host_memory_finding(free: int) -> Finding:
    """The host's free memory, in bytes."""
    return Finding("host memory", f"{free / GB:.0f} GB free")


def device_memory_finding(free: int, total: int) -> Finding:
    """A GPU's memory, in bytes."""
    found = f"{free / GB:.1f} GB free of {total / GB:.1f}"
    if free < (1 - TAKEN) * total:
        return Finding("GPU memory", found, "see what else runs there: nvidia-smi")
    return Finding("GPU memory", found)


def shared_memory_finding(free: int) -> Finding:
    """Shared memory, in bytes, in which processes that load data hand batches over."""
    found = f"{free / GB:.2f} GB free in {SHARED_MEMORY}"
    if free < LEAST_SHARED:
        change = "give the container more (docker run --ipc=host, or --shm-size 8g), or dataloader_num_workers=0"
        return Finding("shared memory", found, change)
    return Finding("shared memory", found)


def _host_memory() -> int:
    """Bytes of the host's memory that are free, for this container if it is one."""
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no limit is the word "max"
        limit = int((CGROUP / "memory.max").read_text())
        free = min(free, limit - int((CGROUP / "memory.current").read_text()))
    return int(free)
