"""Small file systems, mounted for a test; without the right to mount, the test is skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class SmallDisk:
    """A file system of a few mebibytes, mounted at `path`."""

    def __init__(self, path: Path, *, mebibytes: int = 4) -> None:
        self.path = path
        self._mebibytes = mebibytes
        self.state = path / "state"
        self._filling = path / "filling"

    def mount(self) -> None:
        self.path.mkdir(exist_ok=True)
        options = f"size={self._mebibytes}m,mode=0700"
        self._run("mount", "-t", "tmpfs", "-o", options, "imds-bridge-test", str(self.path))

    def unmount(self) -> None:
        self._run("umount", "-l", str(self.path))

    def fill(self) -> None:
        """Take the last byte."""
        with self._filling.open("ab", buffering=0) as file:
            for size in (4096, 1024, 1):
                try:
                    while True:
                        file.write(bytes(size))
                        os.fsync(file)
                except OSError:
                    pass

    def free(self) -> None:
        self._filling.unlink()

    def set_read_only(self, read_only: bool) -> None:
        self._run("mount", "-o", f"remount,{'ro' if read_only else 'rw'}", str(self.path))

    def _run(self, *command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, text=True)


@contextmanager
def small_disk(path: Path, *, mebibytes: int = 4) -> Iterator[SmallDisk]:
    """Mount a small file system, or skip the test."""
    if sys.platform == "win32":
        pytest.skip("posix: Windows mounts no file")
    disk = SmallDisk(path, mebibytes=mebibytes)
    try:
        disk.mount()
    except (OSError, subprocess.CalledProcessError) as error:
        why = str(getattr(error, "stderr", None) or error).splitlines()[0]
        pytest.skip(f"no file system can be mounted here: {why.rpartition(': ')[2]}")
    try:
        yield disk
    finally:
        disk.unmount()
