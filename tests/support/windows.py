"""Windows, as far as Linux can play it: a command of imds-bridge runs without what Windows lacks.

Run as a script it takes a command line of imds-bridge. The libraries are loaded before anything is taken away: they
are not what is tried. What `sys.platform` decides is decided as on Windows.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# A script has no packages beside it.
ROOT = Path(__file__).parents[2]

# What CPython 3.11 for Linux has and CPython 3.12.1 for Windows has not.
ABSENT = json.loads((ROOT / "tests/data/windows/absent.json").read_text(encoding="utf-8"))
BREAK = signal.SIGUSR2  # stands for SIGBREAK, whose number Linux has for another one
# What the commands of the tests need of libraries; to load all would cost each start seconds.
FOR_COMMANDS = ["bridge.roles", "bridge.cli.main", "bridge.cli.render", "bridge.sinks.webhook"]


def become_windows() -> None:
    """Take away what Windows lacks and put in what it has instead, once the libraries are loaded."""
    for name in FOR_COMMANDS:
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "bridge"]:
        del sys.modules[name]
    sys.modules["msvcrt"] = _msvcrt(sys.modules["fcntl"])
    sys.modules["winreg"] = _winreg()
    vars(socket).update(socketpair=_socketpair)
    for module in ("os", "select", "signal", "socket", "time"):
        for name in ABSENT[module]:
            vars(importlib.import_module(module)).pop(name, None)
    vars(selectors).update(DefaultSelector=selectors.SelectSelector)
    sys.modules.update(dict.fromkeys(ABSENT["modules"]))  # None there makes an import fail
    vars(signal).update(SIGBREAK=BREAK, CTRL_BREAK_EVENT=BREAK)
    vars(subprocess).update(CREATE_NEW_PROCESS_GROUP=0x200)
    sys.platform = "win32"


def _msvcrt(fcntl: Any) -> Any:
    """Return a `locking` whose locks belong to who opened the file, and whose refusal is EACCES."""

    def locking(descriptor: int, _mode: int, _length: int) -> None:
        assert os.lseek(descriptor, 0, os.SEEK_CUR) > 0, "a locked byte cannot be read"
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PermissionError(errno.EACCES, "Permission denied") from None

    return SimpleNamespace(locking=locking, LK_NBLCK=2)


def _winreg() -> Any:
    """Return a registry without a key."""

    def no_key(_root: int, name: str) -> None:
        raise FileNotFoundError(2, name)

    return SimpleNamespace(OpenKey=no_key, HKEY_LOCAL_MACHINE=0)


def _socketpair() -> tuple[socket.socket, socket.socket]:
    """Connect two sockets over TCP, as Python does on Windows."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        return server.accept()[0], client


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    become_windows()
    sys.exit(importlib.import_module("bridge.cli.main").main())
