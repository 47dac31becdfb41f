"""hf-distca doctor: check installation and launch, and say what to change before training."""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist

from hf_distca.cli import findings as found
from hf_distca.cli.findings import Finding
from hf_distca.cli.options import positive_seconds
from hf_distca.dispatch.groups import Groups
from hf_distca.dispatch.nodes import ranks_per_node
from hf_distca.measure.links import link_rates
from hf_distca.planner.nodes import node_sizes, nodes_of

DESCRIPTION = """\
Check versions, GPU, kernel, memory, threads, network and settings that contradict each other, and say what to change.
Launched as training will be, it also connects the ranks and measures their links:

  accelerate launch --config_file examples/configs/ddp.yaml --module hf_distca.cli.main doctor
  torchrun --nproc-per-node 8 --no-python hf-distca doctor

Findings are "ok", "advice" (could be better) or "wrong" (must be changed). The exit status is 1 if anything is wrong,
else 0.
"""

CONNECT = "let ranks reach one another first: GLOO_SOCKET_IFNAME above, the launch, and for NCCL see NCCL_DEBUG=INFO"
Rates = Mapping[tuple[int, int], float]
"""GB/s from a sender to a receiver."""
LOOK = "look at what is between these two: every exchange waits for the slowest"
SLOW = 1 / 3
"""Fraction of the median rate of a kind of link, below which a link counts as slow."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument(
        "--timeout",
        type=positive_seconds,
        default=60.0,
        metavar="SECONDS",
        help="time that ranks wait for each other (default: 60)",
    )


def run(options: argparse.Namespace) -> int:
    """Check everything and print the findings on rank 0; return 1 if anything is wrong."""
    device, (world, local) = found.device_of(os.environ), found.number_of_processes(os.environ)
    cuda, cores, threads = device.type == "cuda", os.cpu_count() or 1, torch.get_num_threads()
    mine = [*found.version_findings(), *found.device_findings(device, local)]
    mine += found.launch_findings(os.environ, cuda=cuda, cores=cores, threads=threads)
    if world == 1 or "LOCAL_RANK" not in os.environ:
        return _told([mine], {}, options)
    if cuda:
        torch.cuda.set_device(device)
    try:
        dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=options.timeout))
        groups = Groups(device, options.timeout)
        of_nodes = ranks_per_node(None, options.timeout)
    except (RuntimeError, ValueError) as error:  # ranks are not connected, so each prints its own findings
        return _told([[*mine, Finding("connection", str(error), CONNECT, needed=True)]], {}, options)
    by_rank, rates, sizes = groups.all_gather(mine), link_rates(groups, device), node_sizes(world, of_nodes)
    dist.destroy_process_group()
    nodes = f"{len(sizes)}, of {', '.join(map(str, sorted(set(sizes))))} ranks" if len(sizes) > 1 else "one"
    of_all = [Finding("nodes", nodes), *link_findings(rates, nodes_of(sizes))]
    return _told([[*each, *of_all] for each in by_rank], rates, options, shown=groups.rank == 0)


def link_findings(rates: Rates, nodes: Sequence[int]) -> list[Finding]:
    """Return findings on links within and between nodes; `nodes` is [ranks] the node of each rank."""
    findings = []
    for where in ("within", "between"):
        of_kind = {pair: rates[pair] for pair in rates if (where == "within") == (nodes[pair[0]] == nodes[pair[1]])}
        if of_kind:
            (sender, receiver), slowest = min(of_kind.items(), key=lambda link: link[1])
            middle = median(of_kind.values())
            text = f"{middle:.2f} GB/s; the slowest, rank {sender} to {receiver}, {slowest:.2f}"
            findings.append(Finding(f"links {where} nodes", text, LOOK if slowest < SLOW * middle else ""))
    return findings


def _told(by_rank: list[list[Finding]], rates: Rates, options: argparse.Namespace, *, shown: bool = True) -> int:
    """Print findings and return the exit status."""
    told = found.together(by_rank)
    if shown and options.json:
        findings = [{**asdict(finding), "state": finding.state, "ranks": ranks} for finding, ranks in told]
        links = [{"sender": pair[0], "receiver": pair[1], "rate": rate} for pair, rate in rates.items()]
        print(json.dumps({"findings": findings, "links": links}))
    elif shown:
        print(found.table(told), flush=True)
    return int(any(finding.needed for finding, _ in told))
