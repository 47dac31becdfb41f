"""Findings of hf-distca doctor about installation and launch."""

import importlib.util
import json
import os
import platform
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from importlib.metadata import PackageMetadata, distributions
from ipaddress import ip_address
from itertools import groupby
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from accelerate.utils import str_to_bool
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hf_distca.dispatch.groups import Groups, ranks_per_node
from hf_distca.dispatch.peers import PeerExchanges
from hf_distca.interpreter import FORK_HANGS, fork_can_hang
from hf_distca.kernels import choose_kernel
from hf_distca.models import fla
from hf_distca.plan.nodes import node_sizes, nodes_of
from hf_distca.predict.links import link_rates

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
        return "wrong" if self.needed else "advice" if self.change else "ok"


def report(
    by_rank: Sequence[Sequence[Finding]], rates: Rates, *, as_json: bool, shown: bool = True
) -> int:
    """Print the findings of all ranks, each once and with its ranks; return the exit status."""
    ranks_of: dict[str, dict[Finding, list[int]]] = {}
    for rank, findings in enumerate(by_rank):
        for finding in findings:
            ranks_of.setdefault(finding.name, {}).setdefault(finding, []).append(rank)
    found: list[tuple[Finding, list[int] | None]] = []
    for name, forms in ranks_of.items():
        differ = name in SAME_EVERYWHERE and len({form.found for form in forms}) > 1
        for finding, ranks in forms.items():
            finding = (
                replace(finding, change=AGREE, needed=True)
                if differ and not finding.needed
                else finding
            )
            found.append((finding, ranks if len(ranks) < len(by_rank) else None))
    if shown and as_json:
        listed = [
            {**asdict(finding), "state": finding.state, "ranks": ranks} for finding, ranks in found
        ]
        links = [
            {"sender": pair[0], "receiver": pair[1], "rate": rate} for pair, rate in rates.items()
        ]
        print(json.dumps({"findings": listed, "links": links}), flush=True)
    elif shown:
        width = max(map(len, ranks_of))
        for finding, of_ranks in found:
            runs = [
                list(run)
                for _, run in groupby(enumerate(of_ranks or ()), lambda pair: pair[1] - pair[0])
            ]
            named = ", ".join(
                f"{run[0][1]}-{run[-1][1]}" if run[1:] else f"{run[0][1]}" for run in runs
            )
            where = "" if of_ranks is None else f" ({'ranks' if of_ranks[1:] else 'rank'} {named})"
            print(
                f"{finding.state:<6}  {finding.name:<{width}}  {finding.found}{where}", flush=True
            )
            if finding.change:
                print(f"{'':<{width + 8}}  -> {finding.change}", flush=True)
    return int(any(finding.needed for finding, _ in found))


def version_findings(
    about: PackageMetadata | None, version_of: Callable[[str], str | None]
) -> list[Finding]:
    """Return findings on Python, hf_distca by its metadata, and the packages that hf_distca needs, or can use."""
    if about is None:
        change = "pip install it, from a wheel or with -e from a checkout"
        return [Finding(NAME, "not installed as a package, so what it needs is not known", change)]
    forks = f"{FORK_HANGS}, or leave dataloader_num_workers at 0" if fork_can_hang() else ""
    findings = [
        Finding("python", platform.python_version(), forks),
        Finding(NAME, about["Version"]),
    ]
    needs = [Requirement(line) for line in about.get_all("Requires-Dist", [])]
    for extra in ("", *about.get_all("Provides-Extra", [])):
        for need in needs:
            always, wanted = (
                need.marker is None or need.marker.evaluate({"extra": name}) for name in ("", extra)
            )
            if not wanted or always == bool(extra):
                continue
            found = version_of(need.name)
            if found is None and extra:
                findings.append(
                    Finding(
                        need.name, f"not installed; pip install '{NAME}[{extra}]' if you want it"
                    )
                )
            elif found is not None and need.specifier.contains(found, prereleases=True):
                findings.append(Finding(need.name, found))
            else:
                found, change = (
                    found or "not installed",
                    f"pip install '{need.name}{need.specifier}'",
                )
                findings.append(
                    Finding(need.name, f"{found}, needs {need.specifier}", change, needed=True)
                )
    return findings


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


def device_findings(device: torch.device, processes: int) -> list[Finding]:
    """Return findings on the device, on a host with `processes` processes, and its kernel for most models."""
    found, change = f"cpu, {os.cpu_count()} cores", ""
    if device.type == "cuda":
        about, count = torch.cuda.get_device_properties(device), torch.cuda.device_count()
        free, total = (size / 1e9 for size in torch.cuda.mem_get_info(device))
        found = (
            f"{about.name}, compute capability {about.major}.{about.minor}, {free:.1f} GB free of "
            f"{total:.1f}"
        )
        if processes > count:
            found += f", one of {count} for {processes} processes"
            change = (
                "start no more processes on a host than it has GPUs, or all over gloo "
                "(ddp_backend='gloo')"
            )
    elif torch.version.cuda is None and Path("/dev/nvidiactl").exists():
        found = (
            f"cpu: torch {torch.__version__} was built without CUDA, but the host has an NVIDIA GPU"
        )
        change = "install a build of torch with CUDA (pytorch.org/get-started)"
    findings = [Finding("device", found, change, needed=bool(change))]
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
    """Return findings on packages of kernels for a GPU's other layers: Liger's, and fla's for hybrids."""
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
    given, world = environment.get, int(environment.get("WORLD_SIZE", "1"))
    local = int(given("LOCAL_WORLD_SIZE", world))
    found, change = (
        f"{world}, of which {local} on a host" if local < world else f"{world} on one host",
        "",
    )
    if world == 1:
        found = "1; launched on several, as training will be, this also measures their links"
    elif "LOCAL_RANK" not in environment:
        found = (
            f"{world}, but LOCAL_RANK is not set: each would train alone, on the host's first GPU"
        )
        change = (
            "launch with accelerate launch or torchrun, or set LOCAL_RANK, a process's number on "
            "its host"
        )
    findings = [Finding("processes", found, change, needed=bool(change))]
    found = (
        f"{threads} threads in each of {local} processes on {cores} cores"
        if local > 1
        else f"{threads}"
    )
    fit, change = max(cores // local, 1), ""
    if local > 1 and local * threads > cores and not cuda:
        change = f"set OMP_NUM_THREADS={fit}: threads that wait for a core slow all down"
        change = f"launch at most {cores} processes on this host" if threads == fit else change
    findings += [
        Finding("OMP_NUM_THREADS", found, change),
        _gloo(environment, several_hosts=local < world),
    ]
    if all(str_to_bool(given(f"ACCELERATE_USE_{name}", "false")) for name in ("CPU", "DEEPSPEED")):
        found = "set, and accelerate then trains without DeepSpeed, which was asked for"
        change = (
            "leave it out; processes that see no GPU (CUDA_VISIBLE_DEVICES=) train on the CPU by "
            "themselves"
        )
        findings.append(Finding("ACCELERATE_USE_CPU", found, change, needed=True))
    compiler = given("ACCELERATE_DYNAMO_BACKEND", "no").lower()
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
        allocator = given("PYTORCH_ALLOC_CONF", given("PYTORCH_CUDA_ALLOC_CONF", "not set"))
        change = (
            f"set PYTORCH_ALLOC_CONF={EXPANDABLE}: exchange buffers that grow then leave no gaps "
            "in memory"
        )
        findings.append(
            Finding("PYTORCH_ALLOC_CONF", allocator, "" if EXPANDABLE in allocator else change)
        )
    if cuda and given("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        found = "1, by which kernels of all streams start one after another"
        change = "leave it out unless something else needs it: exchanges then run beside attention"
        findings.append(Finding("CUDA_DEVICE_MAX_CONNECTIONS", found, change))
    return findings


def _gloo(environment: Mapping[str, str], *, several_hosts: bool) -> Finding:
    """Return a finding on the address that gloo, which carries control messages, gives to other hosts."""
    found, address = environment.get(INTERFACE), None
    if found is not None:
        interfaces = [name for _, name in socket.if_nameindex()]
        missing = ", ".join(name for name in found.split(",") if name not in interfaces)
        more = (
            f", but this host has no interface {missing}, only {', '.join(interfaces)}"
            if missing
            else ""
        )
        return Finding(INTERFACE, found + more, HOW if missing else "", needed=bool(missing))
    with suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
    found = (
        f"not set; this host's name {socket.gethostname()!r} resolves to {address or 'no address'}"
    )
    if not several_hosts or (address is not None and not ip_address(address).is_loopback):
        return Finding(INTERFACE, found)
    return Finding(INTERFACE, f"{found}, which no other host reaches", HOW, needed=True)


def check_all(*, timeout: float, as_json: bool) -> int:
    """Check everything and print the findings on rank 0; return 1 if anything is wrong."""
    device, cuda = device_of_rank(), torch.cuda.is_available()
    # The first distribution of a name counts. Names are spelled with dashes, underscores or
    # capitals.
    installed = {
        canonicalize_name(package.name): package for package in reversed([*distributions()])
    }
    about = (
        installed[canonicalize_name(NAME)].metadata
        if canonicalize_name(NAME) in installed
        else None
    )

    def version_of(name: str) -> str | None:
        package = installed.get(canonicalize_name(name))
        return None if package is None else package.version

    mine = version_findings(about, version_of)
    mine += device_findings(
        device, int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    )
    if cuda:
        mine += package_findings(torch.cuda.get_device_capability(device), version_of)
    mine += launch_findings(
        os.environ, cuda=cuda, cores=os.cpu_count() or 1, threads=torch.get_num_threads()
    )
    try:
        groups = connect(device, timeout)
        of_nodes = ranks_per_node(None, timeout)
    except (
        RuntimeError,
        ValueError,
    ) as error:  # ranks are not connected, so each prints its own findings
        mine.append(Finding("connection", str(error), CONNECT, needed=True))
        groups = None
    if groups is None:
        return report([mine], {}, as_json=as_json)
    by_rank, rates = groups.all_gather(mine), link_rates(PeerExchanges(groups, device))
    sizes = node_sizes(len(by_rank), of_nodes)
    dist.destroy_process_group()
    nodes = (
        f"{len(sizes)}, of {', '.join(map(str, sorted(set(sizes))))} ranks"
        if len(sizes) > 1
        else "one"
    )
    of_all = [Finding("nodes", nodes), *link_findings(rates, nodes_of(sizes))]
    return report(
        [[*each, *of_all] for each in by_rank], rates, as_json=as_json, shown=groups.rank == 0
    )


def link_findings(rates: Rates, nodes: Sequence[int]) -> list[Finding]:
    """Return findings on links within and between nodes.

    `nodes` is [ranks] the node of each rank.
    """
    findings, change = (
        [],
        "check the network between these two ranks: every exchange waits for the slowest link",
    )
    for where in ("within", "between"):
        of_kind = {
            pair: rates[pair]
            for pair in rates
            if (where == "within") == (nodes[pair[0]] == nodes[pair[1]])
        }
        if of_kind:
            (sender, receiver), slowest = min(of_kind.items(), key=lambda link: link[1])
            middle = median(of_kind.values())
            text = f"{middle:.2f} GB/s; the slowest, rank {sender} to {receiver}, {slowest:.2f}"
            findings.append(
                Finding(f"links {where} nodes", text, change if slowest < SLOW * middle else "")
            )
    return findings
