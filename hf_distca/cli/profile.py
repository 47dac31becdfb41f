"""hf-distca profile: measure a device, for predictions by hf-distca simulate."""

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hf_distca.cli import InputError
from hf_distca.cli.names import check_kernel
from hf_distca.cli.options import HEADS, add_settings, check_writable, positive
from hf_distca.plan import AttentionKind
from hf_distca.plan.cost import pairs
from hf_distca.predict.device_profile import DeviceProfile
from hf_distca.predict.seconds import DIAGONAL_ROWS, LinkCost, Tasks
from hf_distca.progress import importing, terminal_status

if TYPE_CHECKING:
    import torch

    from hf_distca.kernels import Kernel

TIMEOUT_S = 60.0
SHOWN_TOKENS = 16384
"""Tokens of the document for which the kernel's speed is printed."""

DESCRIPTION = """\
Measure the attention kernel, matrix products and memory of this device and write them as costs to a
file, for hf-distca simulate --profile and the setting device_profile. Launched on several ranks, it
measures their links too; on one rank the file gets the links of an H100. It prints R² and the worst
ratio of predictions to held-out measurements.

  hf-distca profile --output my_gpu.json
  torchrun --nproc-per-node 2 --no-python hf-distca profile --output my_gpu.json
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add("--output", required=True, metavar="FILE", help="file to write")
    add_settings(parser, "attention_kernel")
    for name, (value, help_text) in HEADS.items():
        add(
            f"--{name.replace('_', '-')}",
            type=positive,
            default=value,
            help=f"{help_text} (default: {value})",
        )
    add("--hidden", type=positive, default=4096, help="hidden size of the model (default: 4096)")
    default = "bfloat16 on GPUs, else float32"
    add(
        "--dtype",
        choices=("bfloat16", "float32"),
        help=f"dtype of activations (default: {default})",
    )


def run(options: argparse.Namespace) -> None:
    """Measure and write; raise InputError if kernel, heads or file cannot be used."""
    if os.environ.get("RANK", "0") == "0":  # rank 0 writes the file
        check_writable(options.output)
    check_kernel(options.attention_kernel)

    with importing("torch"):
        import torch
        import torch.distributed as dist

        from hf_distca.cli.ranks import connect, device_of_rank
        from hf_distca.dispatch.peers import PeerExchanges
        from hf_distca.dispatch.world import World
        from hf_distca.profiling.device import measured_profile
        from hf_distca.profiling.links import with_links

    device = device_of_rank()
    dtype: torch.dtype = getattr(
        torch, options.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    )
    kernel, kind = _kernel_and_kind(options, device, dtype)
    with terminal_status("Connecting ranks"):
        groups = connect(device, TIMEOUT_S)
    try:
        profile = measured_profile(
            kernel, kind, options.hidden, dtype, device, progress=groups is None or groups.rank == 0
        )
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        sizes = "--q-heads, --kv-heads, --head-dim or --hidden"
        raise InputError(
            f"{device} has too little memory for rows of this size; make {sizes} smaller"
        ) from error
    links = "links not measured, but taken as those of an H100"
    if groups is not None:
        links = f"links between {len(groups.members)} ranks"
        with terminal_status("Measuring links"):
            profile = with_links(
                profile, PeerExchanges(groups, device), World(TIMEOUT_S).ranks_per_node()
            )
        dist.destroy_process_group()
    if groups is None or groups.rank == 0:
        profile = replace(profile, source=f"{profile.source}; {links}.")
        try:
            profile.save(Path(options.output))
        except OSError as error:
            raise InputError(
                f"cannot write {options.output}: {error.strerror}; name another file"
            ) from error
        print(_table(profile), flush=True)


def _kernel_and_kind(
    options: argparse.Namespace, device: "torch.device", dtype: "torch.dtype"
) -> tuple["Kernel", AttentionKind]:
    """Return the kernel to measure and the heads that it is given; InputError if it cannot run."""
    from hf_distca.kernels import AttentionParams, Need, get_kernel

    head_dim = options.head_dim
    try:
        kind = AttentionKind(None, options.q_heads, options.kv_heads, head_dim, head_dim)
        need = Need(dtype, head_dim, head_dim, AttentionParams(scale=head_dim**-0.5))
        return get_kernel(options.attention_kernel, device, [need]), kind
    except (ValueError, ImportError) as error:
        raise InputError(str(error)) from error


def _table(profile: DeviceProfile) -> str:
    def link(cost: LinkCost) -> str:
        return f"{cost.bandwidth / 1e9:.3g} GB/s, {cost.latency * 1e6:.0f} µs"

    accuracy, kind = profile.accuracy, profile.measured
    amount = pairs(0, SHOWN_TOKENS)
    (seconds,) = profile.forward.seconds(
        Tasks(
            *np.array(
                [
                    [SHOWN_TOKENS],
                    [SHOWN_TOKENS],
                    [amount],
                    [1.0],
                    [SHOWN_TOKENS * DIAGONAL_ROWS],
                    [1.0],
                ]
            )
        )
    )
    tflops = 2.0 * kind.q_heads * (kind.dim_qk + kind.dim_v) * amount / seconds / 1e12
    lines = {
        "device": profile.name,
        f"{SHOWN_TOKENS} tokens' attention": (
            f"{tflops:.3g} TFLOP/s, {profile.forward.call * 1e6:.0f} µs a call"
        ),
        "matrices": f"{profile.flops_per_second / 1e12:.3g} TFLOP/s",
        "memory": f"{profile.bytes_per_second / 1e9:.3g} GB/s",
        "links within nodes": link(profile.links.within),
        "links between nodes": link(profile.links.between),
        "exchange within nodes": link(profile.exchange.within),
        "exchange between nodes": link(profile.exchange.between),
        "held-out calls": (
            f"R² {accuracy.r2:.4f}, worst ratio {accuracy.worst_ratio:.2f}, of {accuracy.count}"
        ),
    }
    return "\n".join(f"{name:<26} {value}" for name, value in lines.items())
