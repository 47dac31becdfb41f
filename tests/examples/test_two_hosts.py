"""examples/slurm.sh on two hosts: network namespaces, and stand-ins for the two commands of Slurm
that it calls.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.hosts import ADDRESSES, Hosts, ip
from tests.examples.running import EXAMPLES, finetune, summary_of
from tests.launch import CONFIGS, cpu_environment

pytestmark = pytest.mark.launches

SRUN = """#!/bin/bash
shift  # its one option
i=0
for host in $HOSTS; do
    SLURM_NODEID=$i ip netns exec "$host" "$@" &
    pids[i++]=$!
done
for pid in "${pids[@]}"; do wait "$pid" || exit 1; done
"""
SCONTROL = f"#!/bin/bash\nprintf '%s\\n' {' '.join(ADDRESSES)}\n"


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two hosts that reach each other by eth0."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    try:
        with Hosts() as hosts:
            for name, device in zip(hosts.names, hosts.devices, strict=True):
                ip("-n", name, "link", "set", device, "down")
                ip("-n", name, "link", "set", device, "name", "eth0", "up")
            yield hosts
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces can be made here: {error}")


def test_the_example_trains_on_two_hosts(hosts, checkpoint, tmp_path):
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = cpu_environment() | {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "host[1-2]"}
    environment |= {"SLURM_JOB_NUM_NODES": "2", "HOSTS": " ".join(hosts.names)}
    environment["PATH"] = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    options = (
        "--max_documents 8 --tokens_per_rank 512 --long_documents split --max_steps 2 "
        "--logging_steps 1"
    )
    command = ["./slurm.sh", CONFIGS / "ddp.yaml", *finetune(checkpoint, tmp_path, options)]
    done = subprocess.run(
        command, cwd=EXAMPLES, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tokens/s on 2 ranks" in done.stdout
    assert summary_of(tmp_path)
