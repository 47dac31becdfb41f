"""Which process a peer is, so that its end is certain: memory that it may write to is not used before."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A process, named so that no other ever has the same name.

    Attributes:
        system: the running system and the space of process numbers that it is in.
        number: its process number there.
        started: when it started, in ticks of the system.
    """

    system: str
    number: int
    started: int

    @classmethod
    def own(cls) -> "Process":
        """This one."""
        number = os.getpid()
        return cls(_system(), number, _state_and_start(number)[1])

    def has_ended(self) -> bool:
        """Whether it certainly does nothing any more; False where that cannot be seen from here."""
        if self.system != _system():
            return False
        try:
            state, started = _state_and_start(self.number)
        except OSError:
            return True
        return state in "ZX" or started != self.started


def _system() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _state_and_start(number: int) -> tuple[str, int]:
    """Fields 3 and 22 of /proc/[pid]/stat, see proc(5); the name before them may hold anything."""
    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])
