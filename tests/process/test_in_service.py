"""`/in-service` of a real listener, as a load balancer asks."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import requests

from bridge.approvals.in_service import MOST_REQUESTS
from tests.support.imds_lab import ImdsLab
from tests.support.ports import free_port
from tests.support.process import (
    LIMIT_SECONDS,
    Forward,
    RawServer,
    answering,
    closed_port,
    dripping,
    silent,
    wait_until,
)

WELL = answering(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
ILL = answering(b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n")


class Probe:
    """Asks as a load balancer does."""

    def __init__(self) -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"

    def ask(self) -> str:
        """Return the status and the word of the answer, "" if there is none."""
        try:
            answer = requests.get(f"http://{self.address}/in-service", timeout=LIMIT_SECONDS)
        except requests.ConnectionError:
            return ""
        return f"{answer.status_code} {answer.text}"

    def wait_for(self, expected: str) -> None:
        wait_until(lambda: self.ask() == expected)

    def raw(self, request: bytes) -> bytes:
        """Return the whole answer to what is sent, nothing if the connection is reset."""
        with (
            suppress(ConnectionError),
            socket.create_connection(("127.0.0.1", self.port), LIMIT_SECONDS) as connection,
        ):
            connection.sendall(request)
            return b"".join(iter(lambda: connection.recv(65536), b""))
        return b""


@contextmanager
def listening(folder: Path, imds: str, probe: Probe, *, also: str = "") -> Iterator[Forward]:
    settings: dict[str, Any] = {
        "imds": {"endpoint": imds},
        "approvals": {"auto": [{"event_type": ["Reboot"], "leave_seconds": 1}]},
        "in_service": {"listen": probe.address, "also": also},
    }
    with Forward(folder, settings, role="listen") as listen:
        yield listen


def test_a_load_balancer_learns_at_once_that_a_vm_leaves_and_when_it_is_back(
    imds: ImdsLab, tmp_path: Path
) -> None:
    probe = Probe()
    with listening(tmp_path, imds.url("web-0"), probe) as listen:
        probe.wait_for("200 in-service")
        event = imds.schedule(event_type="Reboot", resources=["web-0"], notice_seconds=86_400)
        probe.wait_for("503 out-of-service")
        listen.wait_for_log("approving Reboot")
        listen.kill()
    with closed_port() as nowhere, listening(tmp_path, nowhere, probe):
        wait_until(probe.ask)
        assert probe.ask() == "503 out-of-service"  # as it is recorded
    with listening(tmp_path, imds.url("web-0"), probe) as listen:
        imds.complete(event)
        probe.wait_for("200 in-service")
        listen.wait_for_log("the VM is back at work")
        assert listen.current_status()["out_of_work"] == []


def test_an_application_that_is_not_well_is_not_hidden(imds: ImdsLab, tmp_path: Path) -> None:
    probe = Probe()
    serve = [WELL]

    def answer(server: RawServer, connection: socket.socket) -> None:
        serve[0](server, connection)

    with (
        RawServer(answer) as application,
        listening(tmp_path, imds.url("web-0"), probe, also=f"{application.url}/health?deep") as listen,
    ):
        probe.wait_for("200 in-service")
        assert application.requests[0].startswith("GET /health?deep HTTP/1.1\r\nHost: 127.0.0.1:")
        for serve[0] in (ILL, silent, dripping(b"HTTP/1.1 2", b"0")):
            assert probe.ask() == "503 unhealthy"
        serve[0] = WELL
        assert probe.ask() == "200 in-service"
        listen.kill()
    with closed_port() as nowhere, listening(tmp_path, imds.url("web-0"), probe, also=nowhere):
        probe.wait_for("503 unhealthy")


def test_nothing_else_is_served_and_nobody_keeps_others_waiting(imds: ImdsLab, tmp_path: Path) -> None:
    probe = Probe()
    with listening(tmp_path, imds.url("web-0"), probe):
        probe.wait_for("200 in-service")
        hanging = [socket.create_connection(("127.0.0.1", probe.port)) for _ in range(MOST_REQUESTS + 8)]
        answer = probe.raw(b"GET /in-service HTTP/1.1\r\nHost: web-0\r\n\r\n")
        head, _, body = answer.partition(b"\r\n\r\n")
        names = {line.partition(b":")[0] for line in head.splitlines()[1:]}
        assert (body, names) == (
            b"in-service",
            {b"Content-Type", b"Content-Length", b"Connection"},
        )
        for other in (b"GET / HTTP/1.1", b"POST /in-service HTTP/1.1", b"GET /metrics HTTP/1.1", b"\xff \0"):
            assert probe.raw(other + b"\r\n\r\n").startswith(b"HTTP/1.1 404 Not Found\r\n")
        assert probe.raw(b"GET /in-service HTTP/1.1\r\nX: " + b"x" * 10_000) == b""
        for connection in hanging:  # an end that nobody has to wait for
            with connection:
                connection.settimeout(LIMIT_SECONDS)
                assert connection.recv(1) == b""


def test_a_port_that_cannot_be_had_at_the_start_is_listened_on_later(imds: ImdsLab, tmp_path: Path) -> None:
    probe = Probe()
    with (
        socket.create_server(("127.0.0.1", probe.port)) as other,
        listening(tmp_path, imds.url("web-0"), probe) as listen,
    ):
        listen.wait_for_log("cannot be listened on, and is tried again")
        other.close()
        probe.wait_for("200 in-service")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this system has no IPv6")
def test_any_ipv6_address_is_any_ipv4_address_too(imds: ImdsLab, tmp_path: Path) -> None:
    probe = Probe()
    probe.address = f"[::]:{probe.port}"
    with listening(tmp_path, imds.url("web-0"), probe):
        wait_until(lambda: probe.raw(b"GET /in-service HTTP/1.1\r\n\r\n").endswith(b"in-service"))
