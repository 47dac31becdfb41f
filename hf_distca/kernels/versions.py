"""FlashAttention's varlen kernels: from torch, and versions 2, 3 and 4 from their packages.

Shape suffixes: see `varlen`.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

from hf_distca.checks.kernel_rules import Kernels
from hf_distca.kernel_names import KERNEL_PACKAGES, MissingPackageError

from .contract import Need
from .split_calls import ALL_EVEN
from .varlen import FlashVarlenKernel

HUB_BUILD = "kernels-community/flash-attn3"
HUB_VERSION = 1
FIRST_WITH_FA4_WINDOWS = (2, 13)


class FlashAttnKernel(FlashVarlenKernel):
    """FlashAttention-2 of the flash-attn package, 2.7 or later."""

    name = "flash_attn"
    package = KERNEL_PACKAGES[name]
    # The last came with the window as two numbers.
    functions = (
        "_flash_attn_varlen_forward",
        "_flash_attn_varlen_backward",
        "_wrapped_flash_attn_varlen_forward",
    )
    newer = "2.7 or later"
    forward_options: ClassVar = {"dropout_p": 0.0}
    backward_options: ClassVar = {"dropout_p": 0.0, "alibi_slopes": None}


class FlashAttn3Kernel(FlashVarlenKernel):
    """FlashAttention-3 of the flash_attn_3 package, or of its build on the Hugging Face hub.

    Args:
        sm_margin: streaming multiprocessors that a forward leaves to exchanges: its blocks stay for
            the whole kernel call. Blocks of a backward end one by one; the operator takes the
            number there too.
        hub: without the package, take the hub's build by the `kernels` package, which downloads it.
    """

    name = "flash_attn_3"
    majors = (9,)
    gpus = "9.0 (Hopper)"
    forward_grid = ALL_EVEN
    package = KERNEL_PACKAGES[name]
    functions = ("fwd", "bwd")
    names = (*FlashVarlenKernel.names[:5], "is_causal")
    forward_options: ClassVar = {"num_splits": 1}  # splits are for queries of few rows

    def __init__(self, sm_margin: int = 0, *, hub: bool = True) -> None:
        try:
            self.load()  # registers the operators
            operators: Any = torch.ops.flash_attn_3
        except MissingPackageError as missing:
            if not hub:
                raise
            try:
                from kernels import get_kernel
            except ModuleNotFoundError as error:
                # Of another name: the package is there, and what it needs is not.
                raise missing if error.name == "kernels" else error from None
            operators = get_kernel(HUB_BUILD, version=HUB_VERSION).ops
        super().__init__(operators, sm_margin=sm_margin)

    def _padded(self, head_dim_qk: int, head_dim_v: int, device: torch.device) -> tuple[int, int]:
        # The kernel was made for the 192 and 128 of latent attention.
        if 128 < head_dim_qk <= 192 and 96 < head_dim_v <= 128:
            return -(-head_dim_qk // 8) * 8, -(-head_dim_v // 8) * 8
        return super()._padded(head_dim_qk, head_dim_v, device)

    def _check_version(self, need: Need, capability: tuple[int, int]) -> None:
        _check_deterministic(self.name, need)


class FlashAttn4Kernel(FlashVarlenKernel):
    """FlashAttention-4 of the flash-attn-4 package.

    The first kernel call of each kind compiles some seconds.
    """

    name = "flash_attn_4"
    majors = (9, 10)
    gpus = "9.0 (Hopper) or 10.x (Blackwell)"
    forward_grid = backward_grid = ALL_EVEN
    package = KERNEL_PACKAGES[name]
    functions = ("_flash_attn_fwd", "_flash_attn_bwd")
    no_window = None
    no_softcap = None
    do_first = in_place = False
    forward_options: ClassVar = {"return_lse": True}

    def _padded(self, head_dim_qk: int, head_dim_v: int, device: torch.device) -> tuple[int, int]:
        return _head_dims_of_4(head_dim_qk, head_dim_v, torch.cuda.get_device_capability(device)[0])

    def _check_version(self, need: Need, capability: tuple[int, int]) -> None:
        dims = need.head_dim_qk, need.head_dim_v
        if capability[0] == 10 and _head_dims_of_4(*dims, 10) == (256, 256):
            for option, value in {
                "softcap": need.params.softcap,
                "window": need.params.window,
            }.items():
                if value is not None:
                    raise Kernels.WIDE_ON_BLACKWELL.error(
                        kernel=self.name, option=option, value=value, qk=dims[0], v=dims[1]
                    )


class TorchVarlenKernel(FlashVarlenKernel):
    """`aten::_flash_attention_forward` and `_backward`, which torch itself has.

    They are FlashAttention-2, unless the process has activated 3 or 4.

    torch.nn.attention.activate_flash_attention_impl does so; the kernel then has the limits of that
    version.
    """

    name = "torch_varlen"
    has_softcap = False
    names = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "scale", "is_causal")
    no_window = None
    in_place = False
    forward_options: ClassVar = {"dropout_p": 0.0, "return_debug_mask": False}

    def __init__(self) -> None:
        self._forward = torch.ops.aten._flash_attention_forward.default
        self._backward = torch.ops.aten._flash_attention_backward.default
        self._options = {}

    def _check_version(self, need: Need, capability: tuple[int, int]) -> None:
        active = current_flash_attention_impl()
        if active is None:
            return
        gpu = f"{capability[0]}.{capability[1]}"
        if (active, capability[0]) not in (("FA3", 9), ("FA4", 9), ("FA4", 10)):
            raise Kernels.ACTIVATED_ELSEWHERE.error(version=active, capability=gpu)
        if active == "FA3":
            _check_deterministic(self.name, need)
            return
        version = tuple(int(part) for part in torch.__version__.split(".")[:2])
        window = need.params.window
        if window is not None and version < FIRST_WITH_FA4_WINDOWS:
            raise Kernels.ACTIVATED_WITHOUT_WINDOWS.error(window=window, torch=torch.__version__)
        head_dim = -(-max(need.head_dim_qk, need.head_dim_v) // 8) * 8
        if _head_dims_of_4(head_dim, head_dim, capability[0]) != (head_dim, head_dim):
            raise Kernels.ACTIVATED_HEAD_DIM.error(head_dim=head_dim, capability=gpu)

    def _more_of_backward(self, q_QHP: Tensor) -> dict[str, Any]:
        # The state of a random number generator that nothing draws from without dropout.
        rng_state = q_QHP.new_empty(2, dtype=torch.uint64)
        unused = q_QHP.new_empty(0)
        return {"dropout_p": 0.0, "rng_state": rng_state, "unused": unused}


def _head_dims_of_4(head_dim_qk: int, head_dim_v: int, major: int) -> tuple[int, int]:
    """Return the least head dims of FlashAttention-4 that hold these, of at most 256 each.

    Hopper (major 9) takes any multiples of 8 up to 256; Blackwell those up to 128, (192, 128) and
    (256, 256).
    """
    dim_qk, dim_v = -(-head_dim_qk // 8) * 8, -(-head_dim_v // 8) * 8
    if major == 9 or max(dim_qk, dim_v) <= 128:
        return dim_qk, dim_v
    return (192, 128) if dim_qk <= 192 and dim_v <= 128 else (256, 256)


def _check_deterministic(name: str, need: Need) -> None:
    """Raise ValueError where a call asks for a deterministic backward in vain.

    FlashAttention-3 has none for head dims above 192.
    """
    is_wide = max(need.head_dim_qk, need.head_dim_v) > 192
    if is_wide and torch.are_deterministic_algorithms_enabled():
        raise Kernels.NOT_DETERMINISTIC.error(kernel=name, qk=need.head_dim_qk, v=need.head_dim_v)


PACKAGES: dict[str, type[FlashVarlenKernel]] = {
    kernel.name: kernel for kernel in (FlashAttnKernel, FlashAttn3Kernel, FlashAttn4Kernel)
}
"""The kernels that come in packages, by name."""
