"""The port that serves metrics and health, over real sockets."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from bridge.runtime.time import iso_utc
from bridge.service import metrics_server
from bridge.service.metrics import Meter
from bridge.service.metrics_server import MetricsServer
from tests.support.clock import MovedClock


class Rig:
    """A server with the status that it shows."""

    def __init__(self, listen: str = "127.0.0.1:0") -> None:
        self.clock = MovedClock()
        self.status: dict[str, Any] = {
            "role": "forward",
            "storage_error": None,
            "storage_errors": 0,
            "left_sinks": {},
            "outbox_bytes": 0,
            "last_good_at": iso_utc(self.clock.now()),
            "last_error": None,
            "sinks": {},
        }
        registry = CollectorRegistry()
        Meter(registry, ["ops"])
        self.server = MetricsServer(listen, role="forward", registry=registry, clock=self.clock)
        self.server.start(lambda: self.status)

    def get(self, path: str, method: str = "GET") -> tuple[int, str, bytes]:
        """Return the status, the content type and the body of an answer."""
        connection = HTTPConnection("127.0.0.1", self.server.port, timeout=10)
        connection.request(method, path)
        answer = connection.getresponse()
        found = answer.status, answer.headers["Content-Type"], answer.read()
        connection.close()
        return found


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.server.close()


def test_metrics_are_text_that_prometheus_reads(rig: Rig) -> None:
    status, content_type, body = rig.get("/metrics?name=x")
    assert status == 200
    assert content_type.startswith("text/plain; version=")
    assert b'imds_bridge_deliveries_total{result="delivered",sink="ops"} 0.0\n' in body


def test_a_process_that_works_is_alive_and_ready(rig: Rig) -> None:
    for path in ("/livez", "/readyz"):
        assert rig.get(path) == (200, "application/json", b'{"ok": true, "role": "forward", "reasons": []}\n')


def test_what_is_not_ready_answers_503_with_the_reason_and_is_alive(rig: Rig) -> None:
    rig.status["storage_error"] = "disk full"
    status, _, body = rig.get("/readyz")
    assert status == 503
    assert json.loads(body) == {
        "ok": False,
        "role": "forward",
        "reasons": ["the state cannot be written: disk full"],
    }
    assert rig.get("/livez")[0] == 200


def test_a_loop_without_progress_is_not_alive(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "stalled_threads", lambda: ["poll"])
    status, _, body = rig.get("/livez")
    assert status == 503
    assert json.loads(body)["reasons"] == ["the loop poll makes no progress"]


def test_other_paths_name_those_that_exist(rig: Rig) -> None:
    status, _, body = rig.get("/")
    assert (status, body) == (404, b"expected /metrics, /livez or /readyz\n")


def test_head_has_no_body(rig: Rig) -> None:
    assert rig.get("/livez", "HEAD")[::2] == (200, b"")


def test_a_client_that_sends_nothing_blocks_no_other(rig: Rig) -> None:
    with socket.create_connection(("127.0.0.1", rig.server.port)):
        assert rig.get("/livez")[0] == 200


def test_an_address_in_use_is_logged_and_changes_nothing_else(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        second = Rig(f"127.0.0.1:{rig.server.port}")
    assert second.server.port == 0
    assert "no metrics: 127.0.0.1:" in caplog.text
    second.server.close()
    assert rig.get("/livez")[0] == 200


def test_ipv6_is_served() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    rig = Rig("[::1]:0")
    connection = HTTPConnection("::1", rig.server.port, timeout=10)
    connection.request("GET", "/livez")
    assert connection.getresponse().status == 200
    connection.close()
    rig.server.close()
