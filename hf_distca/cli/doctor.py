"""hf-distca doctor: what is installed and launched, and what to change before training."""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist

from hf_distca.cli.findings.finding import Finding, Told, table, told_together
from hf_distca.cli.findings.launch import launch_findings, number_of_processes
from hf_distca.cli.findings.links import Link, link_findings, measured_links
from hf_distca.cli.findings.machine import device_of, machine_findings
from hf_distca.cli.findings.network import network_findings
from hf_distca.cli.findings.versions import agreement_findings, version_findings
from hf_distca.cli.options import positive_seconds
from hf_distca.dispatch.groups import Groups
from hf_distca.dispatch.nodes import ranks_per_node
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
    """Look at everything and tell it; in a launch of several processes rank 0 tells it for all.

    Returns:
        The exit status: 1 if something must be changed, on whichever rank.
    """
    device = device_of(os.environ)
    world, local = number_of_processes(os.environ)
    findings = [
        *version_findings(),
        *machine_findings(device, os.environ),
        *launch_findings(
            os.environ, cuda=device.type == "cuda", cores=os.cpu_count() or 1, threads=torch.get_num_threads()
        ),
        *network_findings(several_hosts=world > local),
    ]
    if world == 1 or "LOCAL_RANK" not in os.environ:
        return _tell(told_together([findings]), [], options)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=options.timeout)
        )
        groups = Groups(device, options.timeout)
        of_nodes = ranks_per_node(None, options.timeout)
    except (RuntimeError, ValueError) as error:  # each rank for itself: they are not connected
        findings.append(Finding("connection", str(error), CONNECT, needed=True))
        return _tell(told_together([findings]), [], options)
    by_rank = groups.all_gather(findings)
    links = measured_links(groups, device)
    dist.destroy_process_group()
    nodes = None if of_nodes in (1, world) else nodes_of(node_sizes(world, of_nodes))
    of_all = [*agreement_findings(by_rank), _nodes(of_nodes, world), *link_findings(links, nodes)]
    told = [*told_together(by_rank), *map(Told, of_all)]
    return _tell(told, links, options) if groups.rank == 0 else _status(told)


def _nodes(of_nodes: int | tuple[int, ...], world: int) -> Finding:
    """Which ranks share a node, as plans will have it."""
    if of_nodes == 1:
        return Finding("nodes", f"{world}, of one rank each")
    if of_nodes == world:
        return Finding("nodes", "one")
    sizes = node_sizes(world, of_nodes)
    return Finding("nodes", f"{len(sizes)}, of {', '.join(map(str, sizes))} ranks")


def _tell(told: Sequence[Told], links: Sequence[Link], options: argparse.Namespace) -> int:
    """Print findings; the exit status."""
    if options.json:
        findings = [{**asdict(each.finding), "state": each.finding.state, "ranks": each.ranks} for each in told]
        print(json.dumps({"findings": findings, "links": [asdict(link) for link in links]}))
    else:
        print(table(told), flush=True)
    return _status(told)


def _status(told: Sequence[Told]) -> int:
    return int(any(each.finding.needed for each in told))
