"""A unit test opens no socket and starts no process."""

from __future__ import annotations

import socket
import subprocess
from typing import Any, NoReturn

import pytest


@pytest.fixture(autouse=True)
def no_socket_and_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a unit test that reaches out of its own process."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a unit test opens no socket and starts no process")

    monkeypatch.setattr(socket.socket, "__init__", refuse)
    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
