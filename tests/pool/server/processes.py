"""A server as a process of its own."""

import re
import subprocess
import sys
from pathlib import Path

from tests.pool.servers import wait_until


class ServerProcess:
    """`hf-distca serve` for a directory at a port of this machine.

    Attributes:
        process: it.
        output: file that its standard output and errors go to.
    """

    def __init__(self, port, token, output, *options):
        self.output = output
        command = [sys.executable, "-m", "hf_distca.cli.main", "serve", "--join", f"127.0.0.1:{port}"]
        command += ["--token-file", "-", "--threads", "1", *options]
        with output.open("w") as file:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT, text=True
            )
        self.process.stdin.write(token.hex() + "\n")
        self.process.stdin.close()

    def wait_for(self, words):
        """Wait until it has said something."""
        wait_until(lambda: words in self.text() or self.process.poll() is not None, 100)
        assert words in self.text(), self.text()

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
