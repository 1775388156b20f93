"""What processes cost, from /proc."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

KIB = 1024
_TICKS = 0 if sys.platform == "win32" else os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a process has used: CPU since its start, and memory now.

    Attributes:
        cpu_seconds: in user and in kernel mode.
        rss_mib: resident, with the pages of libraries that other processes share.
        pss_mib: the same, where a shared page counts in part only.
        threads, files: how many it has.
    """

    cpu_seconds: float = 0.0
    rss_mib: float = 0.0
    pss_mib: float = 0.0
    threads: int = 0
    files: int = 0


def usage(pid: int) -> Usage:
    """Return what a process has used; raise OSError if it has exited."""
    folder = Path(f"/proc/{pid}")
    # The name of the program, in brackets, may contain blanks.
    fields = (folder / "stat").read_text(encoding="ascii").rpartition(")")[2].split()
    lines = (folder / "smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    return Usage(
        cpu_seconds=(int(fields[11]) + int(fields[12])) / _TICKS,
        rss_mib=kib["Rss"] / KIB,
        pss_mib=kib["Pss"] / KIB,
        threads=len([*(folder / "task").iterdir()]),
        files=len([*(folder / "fd").iterdir()]),
    )


def memory_mib(name: str = "VmRSS", pid: int | str = "self") -> float:
    """Return a figure of /proc/PID/status: VmRSS now, VmHWM its peak; raise LookupError if it has ended."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / KIB
    raise LookupError(f"/proc/{pid}/status has no {name}")
