"""Table of kernels that cannot compute a model's attention on a device."""

from hf_distca.checks.refusal import Refusal

HEAD_DIMS = "{qk} for queries and keys and {v} for values"
RESTORE = "call torch.nn.attention.restore_flash_attention_impl(), or use a kernel of another name"


class Kernels:
    """What is refused in `attention_kernel`, for a model and a device."""

    OTHER_DEVICE = Refusal(
        "the device is {device}",
        "kernel 'auto' chooses for cpu and cuda devices only",
        "set attention_kernel='reference', which runs on any device",
        condition="another device than a CPU or a CUDA GPU with `attention_kernel='auto'`",
    )
    NONE_INSTALLED = Refusal(
        "the device is {device}, a GPU of compute capability {capability}",
        "no installed kernel can compute this model's attention on it",
        "remove one of these reasons:{reasons}",
        condition="a model and a GPU for which no kernel is installed",
    )
    ON_CUDA = Refusal(
        "the device is {device}",
        "kernel 'cpu' computes on the CPU",
        "on CUDA use 'torch_varlen' or 'flash_attn'",
        condition="`attention_kernel='cpu'` on a GPU",
    )
    DTYPE_ON_CPU = Refusal(
        "attention is computed in {dtype}",
        "kernel 'cpu' computes in {dtypes}",
        "use 'reference', which takes any dtype",
        condition="`attention_kernel='cpu'` in a dtype that is no floating-point number",
    )
    NOT_ON_CUDA = Refusal(
        "the device is {device}",
        "kernel {kernel!r} computes on CUDA",
        "on the CPU use 'cpu'",
        condition="a kernel of GPUs on the CPU",
    )
    OTHER_GPU = Refusal(
        "the GPU has compute capability {capability}",
        "kernel {kernel!r} needs {gpus}",
        "use {other}",
        condition="a kernel on a GPU that it was not made for",
    )
    DTYPE = Refusal(
        "attention is computed in {dtype}",
        "kernel {kernel!r} computes in float16 and bfloat16",
        "train in bfloat16 (bf16=True), or use 'reference', which takes any dtype but keeps all "
        "scores of a task in memory",
        condition="a kernel of GPUs in float32",
    )
    HEAD_DIM = Refusal(
        f"the head dims are {HEAD_DIMS}",
        "kernel {kernel!r} takes at most {most}",
        "use 'reference', which takes any",
        condition="head dims above 256 with a kernel of GPUs",
    )
    SOFTCAP = Refusal(
        "the model has softcap={softcap}",
        "kernel {kernel!r} does not support softcap",
        "set attention_kernel to 'flash_attn', 'flash_attn_3' or 'flash_attn_4'",
        condition="soft-capped scores (Gemma 2) with `attention_kernel='torch_varlen'`",
    )
    WIDE_ON_BLACKWELL = Refusal(
        f"the model has {{option}}={{value}} and head dims of {HEAD_DIMS}",
        "kernel {kernel!r} has no {option} for such head dims on Blackwell",
        "use 'flash_attn'",
        condition="windows or soft-capped scores, wide heads and FlashAttention-4 on Blackwell",
    )
    NOT_DETERMINISTIC = Refusal(
        f"torch.use_deterministic_algorithms(True) is set, with head dims of {HEAD_DIMS}",
        "kernel {kernel!r} has no deterministic backward for head dims above 192",
        "leave torch.use_deterministic_algorithms(False), or use 'flash_attn'",
        condition="deterministic algorithms with head dims above 192 and FlashAttention-3",
    )
    ACTIVATED_ELSEWHERE = Refusal(
        "{version} is activated in torch",
        "it does not run on a GPU of compute capability {capability} so",
        RESTORE,
        condition="a FlashAttention activated in torch that the GPU does not run",
    )
    ACTIVATED_WITHOUT_WINDOWS = Refusal(
        "FA4 is activated in torch and the model has window={window}",
        "torch {torch} gives it no windows",
        RESTORE,
        condition="FlashAttention-4 activated in torch before 2.13, with windows",
    )
    ACTIVATED_HEAD_DIM = Refusal(
        "FA4 is activated in torch",
        "it has no head dim of {head_dim} on a GPU of compute capability {capability}",
        RESTORE,
        condition="FlashAttention-4 activated in torch, with a head dim that it lacks",
    )
