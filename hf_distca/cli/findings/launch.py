"""How processes were launched, as their environment says, and the settings in it that training does not bear."""

from collections.abc import Mapping

from accelerate.utils import str_to_bool

from hf_distca.cli.findings.finding import Finding

EXPANDABLE = "expandable_segments:True"


def launch_findings(environment: Mapping[str, str], *, cuda: bool, cores: int, threads: int) -> list[Finding]:
    """Number of processes, threads, and traps.

    Args:
        environment: of this process.
        cuda: whether it trains on a GPU.
        cores: of the host, that this process may run on.
        threads: that torch computes with in this process.
    """
    world, local = number_of_processes(environment)
    findings = [_processes(environment, world, local), _threads(local, cores, threads, cuda=cuda)]
    if _is_on(environment, "ACCELERATE_USE_CPU") and _is_on(environment, "ACCELERATE_USE_DEEPSPEED"):
        findings.append(
            Finding(
                "ACCELERATE_USE_CPU",
                "set, and accelerate then trains without DeepSpeed, which was asked for",
                "leave it out; processes that see no GPU (CUDA_VISIBLE_DEVICES=) train on the CPU by themselves",
                needed=True,
            )
        )
    compiles = environment.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if compiles.lower() != "no":
        findings.append(
            Finding(
                "dynamo_backend",
                f"{compiles.lower()}, but whole models cannot be compiled",
                "set it to no in accelerate's config; modules inside layers may be compiled (layer.mlp.compile())",
                needed=True,
            )
        )
    return [*findings, *_of_cuda(environment)] if cuda else findings


def number_of_processes(environment: Mapping[str, str]) -> tuple[int, int]:
    """How many processes were launched, on all hosts and on this one."""
    world = int(environment.get("WORLD_SIZE", "1"))
    return world, int(environment.get("LOCAL_WORLD_SIZE", world))


def _is_on(environment: Mapping[str, str], name: str) -> bool:
    return bool(str_to_bool(environment.get(name, "false")))


def _processes(environment: Mapping[str, str], world: int, local: int) -> Finding:
    if world == 1:
        return Finding("processes", "1; launched on several, as training will be, this also measures their links")
    if "LOCAL_RANK" not in environment:
        return Finding(
            "processes",
            f"{world}, but LOCAL_RANK is not set: each would train alone, on the host's first GPU",
            "launch with accelerate launch or torchrun, or set LOCAL_RANK, a process's number on its host",
            needed=True,
        )
    return Finding("processes", f"{world}, of which {local} on a host" if local < world else f"{world} on one host")


def _threads(local: int, cores: int, threads: int, *, cuda: bool) -> Finding:
    found = f"{threads} threads in each of {local} processes on {cores} cores" if local > 1 else f"{threads}"
    if local * threads <= cores or local == 1 or cuda:
        return Finding("OMP_NUM_THREADS", found)
    fit = max(cores // local, 1)
    if threads == fit:
        return Finding("OMP_NUM_THREADS", found, f"launch at most {cores} processes on this host")
    return Finding("OMP_NUM_THREADS", found, f"set OMP_NUM_THREADS={fit}: threads that wait for a core slow all down")


def _of_cuda(environment: Mapping[str, str]) -> list[Finding]:
    findings = []
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    set_to = next((environment[name] for name in names if name in environment), None)
    findings.append(
        Finding(names[0], set_to)
        if set_to is not None and EXPANDABLE in set_to
        else Finding(
            names[0],
            "not set" if set_to is None else set_to,
            f"set {names[0]}={EXPANDABLE}: exchange buffers that grow then leave no gaps in the GPU's memory",
        )
    )
    if environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        findings.append(
            Finding(
                "CUDA_DEVICE_MAX_CONNECTIONS",
                "1, by which kernels of all streams start one after another",
                "leave it out unless something else needs it: exchanges run beside attention without it",
            )
        )
    return findings
