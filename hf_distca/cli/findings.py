"""Findings of hf-distca doctor about installation and launch."""

import importlib.util
import json
import os
import platform
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageMetadata, distributions
from ipaddress import ip_address
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from accelerate.utils import str_to_bool
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hf_distca.cli.ranks import connect, device_of_rank
from hf_distca.collator.forking import FORK_HANGS, fork_can_hang
from hf_distca.dispatch.peers import PeerExchanges
from hf_distca.dispatch.world import World
from hf_distca.kernels import choose_kernel
from hf_distca.models import fla
from hf_distca.plan.nodes import node_sizes, nodes_of
from hf_distca.profiling.links import link_rates
from hf_distca.progress import terminal_status
from hf_distca.units import counted

CONNECT = (
    "connect the ranks first: see GLOO_SOCKET_IFNAME above, the launch, and for NCCL "
    "NCCL_DEBUG=INFO's output"
)
Rates = Mapping[tuple[int, int], float]
"""GB/s from a sender to a receiver."""
SLOW = 1 / 3
"""Fraction of the median rate of a kind of link, below which a link counts as slow."""
NAME = "hf-distca"
SAME_EVERYWHERE = (NAME, "torch", "transformers", "accelerate", "deepspeed", "attention_kernel")
"""Findings that must be the same on all ranks, which exchange rows in the same order."""
AGREE = (
    "ranks differ: install the same packages on every host, or set attention_kernel to what all "
    "GPUs have"
)
EXPANDABLE = "expandable_segments:True"
INTERFACE = "GLOO_SOCKET_IFNAME"
LIGER = "liger-kernel"
LIGER_GAIN = "use_liger_kernel=True made a step 7.6 % shorter on an H200"
HOW = (
    f"set {INTERFACE} on every host to an interface that the others reach, such as eth0 (ip -brief "
    "address)"
)


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    name: str
    found: str
    change: str = ""  # what to change; empty if nothing
    needed: bool = False  # whether training fails, or ignores a setting, until the change is made

    @property
    def state(self) -> str:
        """One word: ok, advice (better changed) or wrong (must be changed)."""
        if self.needed:
            return "wrong"
        return "advice" if self.change else "ok"


def report(
    findings_of_ranks: Sequence[Sequence[Finding]],
    rates: Rates,
    *,
    as_json: bool,
    shown: bool = True,
) -> int:
    """Print the findings of all ranks, each once and with its ranks; return the exit status."""
    # 1. Ranks with the same finding are one line; ranks that must agree and differ are wrong.
    ranks_by_name: dict[str, dict[Finding, list[int]]] = {}
    for rank, rank_findings in enumerate(findings_of_ranks):
        for finding in rank_findings:
            ranks_by_name.setdefault(finding.name, {}).setdefault(finding, []).append(rank)
    # None in place of ranks: all of them.
    findings: list[tuple[Finding, list[int] | None]] = []
    for name, forms in ranks_by_name.items():
        differ = name in SAME_EVERYWHERE and len({form.found for form in forms}) > 1
        for finding, ranks in forms.items():
            if differ and not finding.needed:
                finding = replace(finding, change=AGREE, needed=True)
            findings.append((finding, ranks if len(ranks) < len(findings_of_ranks) else None))

    # 2. Print them.
    if shown and as_json:
        _print_json(findings, rates)
    elif shown:
        width = max(map(len, ranks_by_name))
        for finding, finding_ranks in findings:
            suffix = "" if finding_ranks is None else f" ({_name_ranks(finding_ranks)})"
            print(
                f"{finding.state:<6}  {finding.name:<{width}}  {finding.found}{suffix}", flush=True
            )
            if finding.change:
                print(f"{'':<{width + 8}}  -> {finding.change}", flush=True)
    return int(any(finding.needed for finding, _ in findings))


def _print_json(findings: Sequence[tuple[Finding, list[int] | None]], rates: Rates) -> None:
    listed = [
        {**asdict(finding), "state": finding.state, "ranks": ranks} for finding, ranks in findings
    ]
    links = [
        {"sender": sender, "receiver": receiver, "rate": rate}
        for (sender, receiver), rate in rates.items()
    ]
    print(json.dumps({"findings": listed, "links": links}), flush=True)


def _name_ranks(ranks: Sequence[int]) -> str:
    """Return sorted ranks as text, such as "rank 3" or "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    names = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(names)}"


def version_findings(
    metadata: PackageMetadata | None, version_of: Callable[[str], str | None]
) -> list[Finding]:
    """Return findings on Python, hf_distca, and the packages that hf_distca needs or can use.

    Args:
        metadata: of hf_distca; None where it is not installed.
        version_of: returns the installed version of a package, or None.
    """
    if metadata is None:
        change = "pip install it, from a wheel or with -e from a checkout"
        return [Finding(NAME, "not installed as a package, so what it needs is not known", change)]
    forks = f"{FORK_HANGS}, or leave dataloader_num_workers at 0" if fork_can_hang() else ""
    findings = [
        Finding("python", platform.python_version(), forks),
        Finding(NAME, metadata["Version"]),
    ]
    needs = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    for extra in ("", *metadata.get_all("Provides-Extra", [])):
        for need in needs:
            is_required = need.marker is None or need.marker.evaluate({"extra": ""})
            belongs_to_extra = need.marker is None or need.marker.evaluate({"extra": extra})
            # What is always required is listed once, and not again for each extra.
            if belongs_to_extra and is_required != bool(extra):
                findings.append(_requirement_finding(need, extra, version_of(need.name)))
    return findings


def _requirement_finding(need: Requirement, extra: str, version: str | None) -> Finding:
    """Return the finding on a package that is required, or belongs to an extra."""
    if version is None and extra:
        hint = f"not installed; pip install '{NAME}[{extra}]' if you want it"
        return Finding(need.name, hint)
    if version is not None and need.specifier.contains(version, prereleases=True):
        return Finding(need.name, version)
    text = f"{version or 'not installed'}, needs {need.specifier}"
    return Finding(need.name, text, f"pip install '{need.name}{need.specifier}'", needed=True)


def device_findings(device: torch.device, processes: int) -> list[Finding]:
    """Return findings on the device and its kernel, on a host with `processes` processes."""
    text = f"cpu, {counted(os.cpu_count() or 1, 'core')}"
    change = ""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        count = torch.cuda.device_count()
        free, total = (size / 1e9 for size in torch.cuda.mem_get_info(device))
        text = (
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{free:.1f} GB free of {total:.1f}"
        )
        if processes > count:
            text += f", one of {count} for {processes} processes"
            change = (
                "start no more processes on a host than it has GPUs, or all over gloo "
                "(ddp_backend='gloo')"
            )
    elif torch.version.cuda is None and Path("/dev/nvidiactl").exists():
        text = (
            f"cpu: torch {torch.__version__} was built without CUDA, but the host has an NVIDIA GPU"
        )
        change = "install a build of torch with CUDA (pytorch.org/get-started)"
    findings = [Finding("device", text, change, needed=bool(change))]
    try:
        kernel, passed_over = choose_kernel(device)
    except ValueError as error:
        return [*findings, Finding("attention_kernel", "none", str(error), needed=True)]
    findings.append(Finding("attention_kernel", f"auto is {kernel.name}"))
    findings += [
        Finding(f"not {name}", "faster on this GPU", why) for name, why in passed_over.items()
    ]
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        change = "pip install triton: it merges the results of two kernels"
        findings.append(Finding("triton", "not installed", change, needed=True))
    return findings


def package_findings(
    capability: tuple[int, int], version_of: Callable[[str], str | None]
) -> list[Finding]:
    """Return findings on kernels for a GPU's other layers: Liger's, and fla's for hybrids."""
    liger = version_of(LIGER)
    if liger is None:
        findings = [
            Finding(
                LIGER,
                f"not installed; {LIGER_GAIN}",
                f"pip install {LIGER}, and set use_liger_kernel=True",
            )
        ]
    else:
        findings = [Finding(LIGER, f"{liger}; {LIGER_GAIN}")]
    versions = fla.versions_that_matter(version_of)
    fault = fla.backward_fault(capability, versions)
    if fault is not None:
        findings.append(Finding(fla.FLA, fault, f"for models with gated delta rules: {fla.REMEDY}"))
    elif versions[fla.FLA] is not None:
        findings.append(Finding(fla.FLA, str(versions[fla.FLA])))
    return findings


def launch_findings(
    environment: Mapping[str, str], *, cuda: bool, cores: int, threads: int
) -> list[Finding]:
    """Return findings on processes, threads per core, the network, and launcher settings."""
    world = int(environment.get("WORLD_SIZE", "1"))
    local = int(environment.get("LOCAL_WORLD_SIZE", world))
    findings = [
        _processes_finding(environment, world, local),
        _threads_finding(local, cores=cores, threads=threads, cuda=cuda),
        _gloo(environment, several_hosts=local < world),
    ]
    switches = ("ACCELERATE_USE_CPU", "ACCELERATE_USE_DEEPSPEED")
    if all(str_to_bool(environment.get(switch, "false")) for switch in switches):
        text = "set, and accelerate then trains without DeepSpeed, which was asked for"
        change = (
            "leave it out; processes that see no GPU (CUDA_VISIBLE_DEVICES=) train on the CPU by "
            "themselves"
        )
        findings.append(Finding("ACCELERATE_USE_CPU", text, change, needed=True))
    compiler = environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if compiler != "no":
        change = (
            "set it to no in accelerate's config; modules inside layers may be compiled "
            "(layer.mlp.compile())"
        )
        findings.append(
            Finding(
                "dynamo_backend", f"{compiler}, but whole models cannot be compiled", change, True
            )
        )
    if cuda:
        old_allocator = environment.get("PYTORCH_CUDA_ALLOC_CONF", "not set")
        allocator = environment.get("PYTORCH_ALLOC_CONF", old_allocator)
        change = (
            f"set PYTORCH_ALLOC_CONF={EXPANDABLE}: exchange buffers that grow then leave no gaps "
            "in memory"
        )
        findings.append(
            Finding("PYTORCH_ALLOC_CONF", allocator, "" if EXPANDABLE in allocator else change)
        )
    if cuda and environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        text = "1, by which kernels of all streams start one after another"
        change = "leave it out unless something else needs it: exchanges then run beside attention"
        findings.append(Finding("CUDA_DEVICE_MAX_CONNECTIONS", text, change))
    return findings


def _processes_finding(environment: Mapping[str, str], world: int, local: int) -> Finding:
    """Return a finding on the `world` processes of a launch, `local` of them on this host."""
    text = f"{world}, of which {local} on a host" if local < world else f"{world} on one host"
    change = ""
    if world == 1:
        text = "1; launched on several, as training will be, this also measures their links"
    elif "LOCAL_RANK" not in environment:
        text = (
            f"{world}, but LOCAL_RANK is not set: each would train alone, on the host's first GPU"
        )
        change = (
            "launch with accelerate launch or torchrun, or set LOCAL_RANK, a process's number on "
            "its host"
        )
    return Finding("processes", text, change, needed=bool(change))


def _threads_finding(local: int, *, cores: int, threads: int, cuda: bool) -> Finding:
    """Return a finding on the threads of `local` processes on a host."""
    if local == 1:
        return Finding("OMP_NUM_THREADS", f"{threads}")
    text = f"{counted(threads, 'thread')} in each of {local} processes on {counted(cores, 'core')}"
    fitting_threads = max(cores // local, 1)
    change = ""
    if local * threads > cores and not cuda:
        change = (
            f"set OMP_NUM_THREADS={fitting_threads}: threads that wait for a core slow all down"
        )
        if threads == fitting_threads:
            change = f"launch at most {cores} processes on this host"
    return Finding("OMP_NUM_THREADS", text, change)


def _gloo(environment: Mapping[str, str], *, several_hosts: bool) -> Finding:
    """Return a finding on the address that gloo gives to other hosts, for control messages."""
    names = environment.get(INTERFACE)
    if names is not None:
        interfaces = [name for _, name in socket.if_nameindex()]
        missing = ", ".join(name for name in names.split(",") if name not in interfaces)
        if not missing:
            return Finding(INTERFACE, names)
        text = f"{names}, but this host has no interface {missing}, only {', '.join(interfaces)}"
        return Finding(INTERFACE, text, HOW, needed=True)
    address: str | None = None
    with suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
    text = (
        f"not set; this host's name {socket.gethostname()!r} resolves to {address or 'no address'}"
    )
    if not several_hosts or (address is not None and not ip_address(address).is_loopback):
        return Finding(INTERFACE, text)
    return Finding(INTERFACE, f"{text}, which no other host reaches", HOW, needed=True)


def check_all(*, timeout: float, as_json: bool) -> int:
    """Check everything and print the findings on rank 0; return 1 if anything is wrong."""
    device = device_of_rank()
    cuda = torch.cuda.is_available()
    # The first distribution of a name counts. Names are spelled with dashes, underscores or
    # capitals.
    installed = {
        canonicalize_name(package.name): package for package in reversed([*distributions()])
    }
    own_package = installed.get(canonicalize_name(NAME))
    metadata = None if own_package is None else own_package.metadata

    def version_of(name: str) -> str | None:
        package = installed.get(canonicalize_name(name))
        return None if package is None else package.version

    # 1. What a rank finds by itself.
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    findings = version_findings(metadata, version_of)
    findings += device_findings(device, processes)
    if cuda:
        findings += package_findings(torch.cuda.get_device_capability(device), version_of)
    findings += launch_findings(
        os.environ, cuda=cuda, cores=os.cpu_count() or 1, threads=torch.get_num_threads()
    )

    # 2. What connected ranks find together. Ranks that cannot connect print their own findings.
    try:
        with terminal_status("Connecting ranks"):
            groups = connect(device, timeout)
            ranks_of_nodes = World(timeout).ranks_per_node()
    except (RuntimeError, ValueError) as error:
        findings.append(Finding("connection", str(error), CONNECT, needed=True))
        groups = None
    if groups is None:
        return report([findings], {}, as_json=as_json)
    findings_of_ranks = groups.all_gather(findings)
    with terminal_status("Measuring links"):
        rates = link_rates(PeerExchanges(groups, device))
    sizes = node_sizes(len(findings_of_ranks), ranks_of_nodes)
    dist.destroy_process_group()
    nodes = "one"
    if len(sizes) > 1:
        *fewer, most = sorted(set(sizes))
        nodes = f"{len(sizes)}, of {', '.join([*map(str, fewer), counted(most, 'rank')])}"
    common = [Finding("nodes", nodes), *link_findings(rates, nodes_of(sizes))]
    everything = [[*rank_findings, *common] for rank_findings in findings_of_ranks]
    return report(everything, rates, as_json=as_json, shown=groups.rank == 0)


def link_findings(rates: Rates, nodes: Sequence[int]) -> list[Finding]:
    """Return findings on links within and between nodes.

    `nodes` is [ranks] the node of each rank.
    """
    findings = []
    change = "check the network between these two ranks: every exchange waits for the slowest link"
    for reach in ("within", "between"):
        reach_rates = {
            (sender, receiver): rate
            for (sender, receiver), rate in rates.items()
            if (nodes[sender] == nodes[receiver]) == (reach == "within")
        }
        if reach_rates:
            (sender, receiver), slowest = min(reach_rates.items(), key=lambda link: link[1])
            middle = median(reach_rates.values())
            text = f"{middle:.2f} GB/s; the slowest, rank {sender} to {receiver}, {slowest:.2f}"
            is_slow = slowest < SLOW * middle
            findings.append(Finding(f"links {reach} nodes", text, change if is_slow else ""))
    return findings
