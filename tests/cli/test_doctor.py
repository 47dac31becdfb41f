import json
from email import message_from_string
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from hf_distca.cli import findings as of_doctor
from hf_distca.cli.findings import (
    Finding,
    device_findings,
    launch_findings,
    link_findings,
    package_findings,
    report,
    version_findings,
)
from tests.launch import run_in_forks


def of_launch(name, cuda=False, threads=1, **environment):
    """State, result and change of the finding of this name on a made-up launch with 8 cores, if
    there is one.
    """
    findings = launch_findings(environment, cuda=cuda, cores=8, threads=threads)
    return [
        value
        for finding in findings
        if finding.name == name
        for value in (finding.state, finding.found, finding.change)
    ]


def launch(processes, local):
    return {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(local), "LOCAL_RANK": "0"}


def test_findings_of_ranks_are_merged(capsys):
    torch_ = Finding("torch", "2.13.0")
    old = Finding("torch", "2.9.0, needs >=2.11", "pip install torch", True)
    device = Finding("device", "cpu", "look")
    peft = Finding("peft", "0.18")
    newer = Finding("peft", "0.19")
    by_rank = [[torch_, device, peft], [torch_, device, newer], [old, device], [torch_, device]]
    assert report(by_rank, {}, as_json=False) == 1
    assert capsys.readouterr().out.splitlines() == [  # ranks may differ in peft, but not in torch
        "wrong   torch   2.13.0 (ranks 0-1, 3)",
        f"                -> {of_doctor.AGREE}",
        "wrong   torch   2.9.0, needs >=2.11 (rank 2)",
        "                -> pip install torch",
        "advice  device  cpu",
        "                -> look",
        "ok      peft    0.18 (rank 0)",
        "ok      peft    0.19 (rank 1)",
    ]


def test_versions_are_compared_with_requirements():
    needs = ["numpy>=2.0", "torch>=2.11", "transformers<6,>=5.17", 'peft>=0.18; extra == "peft"']
    needs += [
        'deepspeed>=0.18; extra == "deepspeed"',
        'ruff>=0.8; extra == "dev"',
        'tqdm; python_version < "3"',
    ]
    lines = ["Version: 1", "Provides-Extra: deepspeed", "Provides-Extra: peft"]
    about = message_from_string("\n".join([*lines, *(f"Requires-Dist: {need}" for need in needs)]))
    versions = {"numpy": "2.4.6", "transformers": "6.0.0.dev0", "peft": "0.17.0", "ruff": "0.1"}
    _, own, *requirements = version_findings(about, versions.get)
    assert own == Finding("hf-distca", "1")
    assert requirements == [
        Finding("numpy", "2.4.6"),
        Finding("torch", "not installed, needs >=2.11", "pip install 'torch>=2.11'", needed=True),
        Finding(
            "transformers",
            "6.0.0.dev0, needs <6,>=5.17",
            "pip install 'transformers<6,>=5.17'",
            needed=True,
        ),
        Finding("deepspeed", "not installed; pip install 'hf-distca[deepspeed]' if you want it"),
        Finding("peft", "0.17.0, needs >=0.18", "pip install 'peft>=0.18'", needed=True),
    ]


def test_packages_of_kernels():
    liger, *none = package_findings((8, 0), {"triton": "3.6.0"}.get)
    assert none == []
    assert liger.name == "liger-kernel"
    assert liger.state == "advice"
    assert liger.change == "pip install liger-kernel, and set use_liger_kernel=True"
    versions = {"liger-kernel": "0.8.0", "fla-core": "0.6.0", "triton": "3.6.0"}
    liger, delta_rules = package_findings((9, 0), versions.get)
    assert liger == Finding("liger-kernel", f"0.8.0; {of_doctor.LIGER_GAIN}")
    assert delta_rules.name == "fla-core"
    assert delta_rules.state == "advice"
    assert delta_rules.found.startswith(
        "fla 0.6.0 raises in the backward of gated delta rules on Hopper with Triton"
    )
    assert "pip install 'triton>=3.7.1', or pip install tilelang" in delta_rules.change
    _, delta_rules = package_findings((8, 0), versions.get)
    assert delta_rules == Finding("fla-core", "0.6.0")
    _, delta_rules = package_findings(
        (9, 0), {"flash-linear-attention": "0.3.2", "triton": "3.4.0"}.get
    )
    assert delta_rules.found.startswith(
        "fla 0.3.2 raises"
    )  # before fla-core was a package of its own


def test_processes_of_a_launch():
    assert of_launch("processes", **launch(8, 4)) == ["ok", "8, of which 4 on a host", ""]


@pytest.mark.parametrize(
    ("name", "cuda", "environment", "states"),
    [
        ("processes", False, {}, ["ok"]),
        ("processes", False, {"WORLD_SIZE": "8"}, ["wrong"]),
        (
            "ACCELERATE_USE_CPU",
            False,
            {"ACCELERATE_USE_CPU": "true", "ACCELERATE_USE_DEEPSPEED": "true"},
            ["wrong"],
        ),
        ("ACCELERATE_USE_CPU", False, {"ACCELERATE_USE_CPU": "true"}, []),
        ("dynamo_backend", True, {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, ["wrong"]),
        ("dynamo_backend", True, {"ACCELERATE_DYNAMO_BACKEND": "no"}, []),
        ("PYTORCH_ALLOC_CONF", False, {}, []),
        ("PYTORCH_ALLOC_CONF", True, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, ["advice"]),
        (
            "PYTORCH_ALLOC_CONF",
            True,
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            ["ok"],
        ),
        ("CUDA_DEVICE_MAX_CONNECTIONS", True, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, ["advice"]),
        ("CUDA_DEVICE_MAX_CONNECTIONS", True, {}, []),
    ],
    ids=[
        "one process",
        "size without rank",
        "CPU by DeepSpeed",
        "CPU",
        "inductor",
        "no compiler",
        "allocator on a CPU",
        "segments that do not expand",
        "segments that expand",
        "one connection",
        "connections by default",
    ],
)
def test_settings_of_the_environment(name, cuda, environment, states):
    assert of_launch(name, cuda=cuda, **environment)[:1] == states


@pytest.mark.parametrize(
    ("processes", "local", "threads", "state", "change"),
    [
        (8, 4, "2 threads", "ok", ""),
        (
            4,
            4,
            "8 threads",
            "advice",
            "set OMP_NUM_THREADS=2: threads that wait for a core slow all down",
        ),
        (9, 9, "1 thread", "advice", "launch at most 8 processes on this host"),
    ],
    ids=["cores enough", "too many threads", "too many processes"],
)
def test_threads_of_processes_on_a_host(processes, local, threads, state, change):
    described = f"{threads} in each of {local} processes on 8 cores"
    number = int(threads.split()[0])
    assert of_launch("OMP_NUM_THREADS", threads=number, **launch(processes, local)) == [
        state,
        described,
        change,
    ]


UNSET = "not set; this host's name 'a' resolves to"


@pytest.mark.parametrize(
    ("interfaces", "processes_here", "address", "state", "described"),
    [
        ("eth0", 4, None, "ok", "eth0"),
        (
            "eth0,ib0",
            4,
            None,
            "wrong",
            "eth0,ib0, but this host has no interface ib0, only lo, eth0",
        ),
        (None, 4, "10.0.0.7", "ok", f"{UNSET} 10.0.0.7"),
        (None, 4, None, "wrong", f"{UNSET} no address, which no other host reaches"),
        (None, 4, "127.0.1.1", "wrong", f"{UNSET} 127.0.1.1, which no other host reaches"),
        (None, 8, "127.0.1.1", "ok", f"{UNSET} 127.0.1.1"),
    ],
    ids=[
        "interface",
        "missing interface",
        "address",
        "no address",
        "loopback",
        "loopback on one host",
    ],
)
def test_addresses_that_gloo_gives(
    monkeypatch, interfaces, processes_here, address, state, described
):
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    monkeypatch.setattr("socket.gethostname", lambda: "a")
    resolve = Mock(return_value=address, side_effect=None if address else OSError)
    monkeypatch.setattr("socket.gethostbyname", resolve)
    environment = launch(8, processes_here) | (
        {"GLOO_SOCKET_IFNAME": interfaces} if interfaces else {}
    )
    assert of_launch("GLOO_SOCKET_IFNAME", **environment) == [
        state,
        described,
        of_doctor.HOW if state == "wrong" else "",
    ]


def test_a_gpu_that_no_kernel_supports_and_slow_links(monkeypatch):
    about = SimpleNamespace(name="T4", major=7, minor=5)
    of_torch = {"get_device_capability": (7, 5), "get_device_properties": about}
    for name, value in (of_torch | {"mem_get_info": (12e9, 16e9), "device_count": 2}).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    device, none = device_findings(torch.device("cuda"), 2)
    assert device == Finding("device", "T4, compute capability 7.5, 12.0 GB free of 16.0")
    assert none.name == "attention_kernel"
    assert none.found == "none"
    assert none.state == "wrong"
    assert "of compute capability 7.5, but" in none.change
    shared, _ = device_findings(torch.device("cuda"), 3)
    assert shared.state == "wrong"
    assert shared.found.endswith(", one of 2 for 3 processes")
    assert device_findings(torch.device("cpu"), 1)[1:] == [
        Finding("attention_kernel", "auto is cpu")
    ]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    faster = [
        finding for finding in device_findings(torch.device("cuda"), 1) if finding.state == "advice"
    ]
    assert [finding.name for finding in faster[:2]] == ["not flash_attn_3", "not flash_attn_4"]
    rates = {(0, 1): 400.0, (1, 0): 390.0, (0, 2): 40.0, (2, 0): 42.0, (1, 2): 41.0, (2, 1): 9.0}
    within, between = link_findings(rates, (0, 0, 1))
    assert within == Finding("links within nodes", "395.00 GB/s; the slowest, rank 1 to 0, 390.00")
    assert between.found == "40.50 GB/s; the slowest, rank 2 to 1, 9.00"
    assert between.state == "advice"


def test_one_process(monkeypatch, run):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    status, printed, _ = run("doctor")
    assert status == 0
    assert {line.split()[0] for line in printed.splitlines()} - {"ok", "advice", "->"} == set()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    status, printed, _ = run("doctor", "--json")
    states = {finding["name"]: finding["state"] for finding in json.loads(printed)["findings"]}
    assert status == 1
    assert states["GLOO_SOCKET_IFNAME"] == "wrong"


@pytest.mark.parametrize("timeout", ["nan", "inf", "0", "x"])
def test_time_limits_that_are_none(run, timeout):
    assert "--timeout: must be " in run("doctor", "--timeout", timeout)[2]


def test_names_of_packages_are_spelled_in_several_ways(monkeypatch, run):
    about = message_from_string("Version: 1\nRequires-Dist: flash-attn>=2.7")
    packages = [
        ("HF_DistCA", "1"),
        ("Flash_Attn", "2.8"),
        ("flash-attn", "2.1"),
    ]  # the first of a name counts
    distributions = [
        SimpleNamespace(name=name, version=version, metadata=about) for name, version in packages
    ]
    monkeypatch.setattr(of_doctor, "distributions", lambda: iter(distributions))
    findings = json.loads(run("doctor", "--json")[1])["findings"]
    assert [finding["found"] for finding in findings if finding["name"] == "flash-attn"] == ["2.8"]


@pytest.mark.launches
def test_a_launch(tmp_path):
    script = tmp_path / "doctor.py"
    script.write_text("from hf_distca.cli.main import main; raise SystemExit(main())")
    codes = run_in_forks("ddp", script, ["doctor", "--json"], tmp_path)
    text = (tmp_path / "output-0").read_text()
    assert codes == [0, 0], text
    printed, _ = json.JSONDecoder().raw_decode(text[text.index("{") :])
    findings = {finding["name"]: finding for finding in printed["findings"]}
    assert findings["processes"]["found"] == "2 on one host"
    assert findings["nodes"]["found"] == "one"
    assert findings["links within nodes"]["found"].endswith(
        f"{min(link['rate'] for link in printed['links']):.2f}"
    )
    assert findings["torch"]["ranks"] is None
