"""A Debian with systemd as process 1, in namespaces on this machine, with its network or one of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.paths import ROOT
from tests.support.process import wait_until
from tests.support.programs import tool

PACKAGES = ("systemd", "systemd-sysv", "dbus")
CHECKOUT = ("bridge", "schemas", "infra", "requirements", "tools", "pyproject.toml", "README.md", "LICENSE")
HOST_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CLAIM = """#!/bin/sh
[ "$1" != --version ] || {{ echo "systemd {}"; exit; }}
exec /usr/bin/systemctl "$@"
"""
LENT = """#!/bin/sh
exec /opt/python/ld-linux-x86-64.so.2 --library-path /opt/python --argv0 "$0" /opt/python/python3.11 "$@"
"""
COMMAND_SECONDS = 400.0  # an installation on a busy machine


@dataclass(frozen=True, kw_only=True)
class System:
    """A Debian with what it needs, the version of systemd that it claims, whose Python it has, and its network."""

    suite: str
    packages: tuple[str, ...]
    claimed_systemd: int | None = None
    borrowed_python: System | None = None  # its own is too old
    has_own_network: bool = False

    def make(self) -> Path:
        """Return the folder of its files; skip if they cannot be made."""
        tool("mmdebstrap")
        command = [str(ROOT / "tests/support/debian"), self.suite, *PACKAGES, *self.packages]
        return Path(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip())


class Machine:
    """The system that has booted; `root` is where its files are, as seen from outside."""

    def __init__(self, root: Path, pid: int) -> None:
        self.root = root
        self._enter = ["nsenter", "-t", str(pid), "-m", "-p", "-u", "-i", "-C", "-n", "--"]

    def try_to_do(self, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a line of shell as root in it."""
        pip = {name: value for name, value in os.environ.items() if name in ("PIP_INDEX_URL", "PIP_CERT")}
        given = {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8", **pip, **variables}
        settings = (f"{name}={value}" for name, value in given.items())
        shell = [*self._enter, "env", "-i", *settings, "bash", "-c", command]
        return subprocess.run(shell, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)

    def do(self, command: str, **variables: str) -> str:
        """Run a line of shell as root in it, which must succeed; return what it prints."""
        done = self.try_to_do(command, **variables)
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def has_booted(self) -> bool:
        state = self.try_to_do("systemctl is-system-running").stdout.strip()
        return state in ("running", "degraded")

    def show(self, unit: str, name: str) -> str:
        """Return a property of a unit."""
        return self.do(f"systemctl show --value --property={name} imds-bridge-{unit}").strip()

    def wait_until_active(self, unit: str) -> None:
        """Wait until a unit has reported that it is ready."""
        wait_until(
            lambda: self.show(unit, "SubState") == "running",
            describe=lambda: self.try_to_do(f"journalctl -u imds-bridge-{unit} -n 30").stdout,
        )

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a file, and the folders above it."""
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)


def lend_python(donor: Path, root: Path) -> None:
    """Install the Python 3.11 of another Debian with its own C library and others, as one that was built there."""
    shutil.copytree(donor / "usr/lib/python3.11", root / "usr/local/lib/python3.11")
    libraries = root / "opt/python"
    libraries.mkdir()
    for library in (donor / "usr/lib/x86_64-linux-gnu").glob("*.so*"):
        shutil.copy(library, libraries)
    shutil.copy(donor / "usr/bin/python3.11", libraries)
    script = root / "usr/local/bin/python3.11"
    script.write_text(LENT)
    script.chmod(0o755)


@contextmanager
def booted(system: System) -> Iterator[Machine]:
    """Boot a copy of a system; skip if only root may do that."""
    if os.getuid():
        pytest.skip("only root can boot systemd in namespaces: sudo make units")
    kept = system.make()
    with TemporaryDirectory() as folder:
        log = Path(folder, "log")
        network = ["--net"] if system.has_own_network else []
        with subprocess.Popen([ROOT / "tests/systemd/boot", kept, folder, *network]) as boot:
            pid = wait_until(lambda: _find_systemd(boot))
            try:
                machine = Machine(Path(f"/proc/{pid}/root"), pid)
                wait_until(machine.has_booted, describe=log.read_text)
                if system.borrowed_python:
                    lend_python(system.borrowed_python.make(), machine.root)
                if system.claimed_systemd:
                    machine.write("/usr/local/bin/systemctl", CLAIM.format(system.claimed_systemd), 0o755)
                yield machine
            finally:
                os.kill(pid, signal.SIGKILL)  # which ends all that runs in it
                boot.wait()


def add_host_files(root: Path) -> None:
    """Copy what an installation from a network needs of this machine."""
    for file in filter(os.path.exists, HOST_FILES):
        (root / file[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, root / file[1:])
    with (root / "etc/pip.conf").open("a") as settings:  # which concern other programs
        settings.write("[install]\nuser = true\ntarget = /srv/foreign\n")


def add_checkout(root: Path) -> None:
    """Copy the checkout to /srv/imds-bridge, and what its installation needs of this machine."""
    add_host_files(root)
    for name in CHECKOUT:
        source, target = ROOT / name, root / "srv/imds-bridge" / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
        else:
            shutil.copy(source, target)


def _find_systemd(boot: subprocess.Popen[bytes]) -> int:
    """Return the process id of the systemd below the script, 0 while there is none."""
    assert boot.poll() is None, "the script has ended"
    waiting = [boot.pid]
    while waiting:
        pid = waiting.pop()
        try:
            if Path(f"/proc/{pid}/comm").read_text() == "systemd\n":
                return pid
            waiting += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
    return 0
