"""A server as a process of its own."""

import re
import subprocess
import sys
from pathlib import Path

from tests.pool.servers import wait_until


class ServerProcess:
    """`hf-distca serve` for a directory of this process.

    Attributes:
        process: it.
        output: file that its standard output and errors go to.
    """

    def __init__(self, directory, token, folder, *options):
        self.output = folder / "output.txt"
        self.directory = directory
        join = ["--join", f"127.0.0.1:{directory.port}", "--token-file", "-", "--threads", "1"]
        with self.output.open("w") as output:
            command = [sys.executable, "-m", "hf_distca.cli.main", "serve", *join, *options]
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, text=True
            )
        self.process.stdin.write(token.hex() + "\n")
        self.process.stdin.close()

    def joined(self):
        """Wait until it is a member; its info."""
        wait_until(lambda: self.directory.members() or self.process.poll() is not None, 90)
        assert self.process.poll() is None, self.text()
        return self.directory.members()[0]

    def text(self):
        """What it has said so far."""
        return self.output.read_text()

    def memory(self):
        """Bytes of memory that it uses."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024

    def close(self):
        """End it, whatever it does."""
        self.process.kill()
        self.process.wait()
