"""Return kernels by name, and choose the one that "auto" is."""

from collections.abc import Sequence

import torch

from hf_distca.checks.kernel_rules import Kernels

from .contract import AttentionParams, Kernel, Need
from .cpu import CpuKernel
from .reference import ReferenceKernel
from .versions import PACKAGES, FlashAttn3Kernel, TorchVarlenKernel

KERNELS: dict[str, type[Kernel]] = {
    "reference": ReferenceKernel,
    "cpu": CpuKernel,
    "torch_varlen": TorchVarlenKernel,
    **PACKAGES,
}

FASTEST_FIRST = {
    9: ("flash_attn_3", "flash_attn_4", "torch_varlen", "flash_attn"),
    10: ("flash_attn_4", "torch_varlen", "flash_attn"),
}
"""By major compute capability. FlashAttention-3 and 4 are up to twice as fast there as
FlashAttention-2, which the two others are; of these, torch's needs no installation."""
ELSEWHERE = ("torch_varlen", "flash_attn")

USUAL = Need(torch.bfloat16, 128, 128, AttentionParams(scale=128**-0.5))
"""What most models need; for a choice before the model is known."""


def get_kernel(
    name: str,
    device: torch.device,
    needs: Sequence[Need] = (),
    *,
    sm_margin: int = 0,
    hub: bool = True,
) -> Kernel:
    """Return a kernel by name, which runs on the device and can do what is needed.

    For `sm_margin` and `hub` see `FlashAttn3Kernel`.

    Raises:
        KeyError: no kernel has this name.
        ValueError: the kernel cannot do what is needed.
        ImportError: the kernel's package is missing, or cannot be imported.
    """
    if name == "auto":
        return choose_kernel(device, needs, sm_margin=sm_margin)[0]
    kernel = FlashAttn3Kernel(sm_margin, hub=hub) if name == "flash_attn_3" else KERNELS[name]()
    for need in needs:
        kernel.check(need, device)
    return kernel


def choose_kernel(
    device: torch.device, needs: Sequence[Need] = (), *, sm_margin: int = 0
) -> tuple[Kernel, dict[str, str]]:
    """Choose the fastest kernel that is installed and can do what is needed. Nothing is downloaded.

    Returns:
        The kernel, and by name the error of each faster kernel.

    Raises:
        ValueError: no kernel can; the error has the reason for each.
    """
    if device.type == "cpu":
        return get_kernel("cpu", device, needs), {}
    if device.type != "cuda":
        raise Kernels.OTHER_DEVICE.error(device=device)
    major, minor = torch.cuda.get_device_capability(device)
    passed_over: dict[str, str] = {}
    for name in FASTEST_FIRST.get(major, ELSEWHERE):
        try:
            return get_kernel(
                name, device, needs or (USUAL,), sm_margin=sm_margin, hub=False
            ), passed_over
        except (ImportError, ValueError) as error:
            passed_over[name] = str(error)
    reasons = "".join(f"\n- {reason}" for reason in passed_over.values())
    raise Kernels.NONE_INSTALLED.error(
        device=device, capability=f"{major}.{minor}", reasons=reasons
    )
