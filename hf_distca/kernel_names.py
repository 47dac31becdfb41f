"""Names of attention kernels, for settings and options, which must not wait for torch."""

KERNEL_NAMES = (
    "auto",
    "reference",
    "cpu",
    "torch_varlen",
    "flash_attn",
    "flash_attn_3",
    "flash_attn_4",
)
"""Values of `attention_kernel`: "auto", and the names of `hf_distca.kernels.KERNELS`."""
