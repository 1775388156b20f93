"""The port that serves metrics and health, over real sockets."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from http.client import HTTPConnection
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from bridge.process import metrics
from bridge.process.metrics import Meter, MetricsServer
from tests.support.clock import MovedClock
from tests.support.ports import ReservedPorts
from tests.support.status import process_status


class Served:
    """A server with the status that it shows."""

    def __init__(self, listen: str = "127.0.0.1:0", *, role: str = "forward", **more: Any) -> None:
        self.host = listen.rpartition(":")[0].strip("[]")
        self.clock = MovedClock()
        self.status = process_status(self.clock.now())
        registry = CollectorRegistry()
        Meter(registry, ["ops"])
        last = more.pop("last", "")
        self.server = MetricsServer(listen, role=role, registry=registry, clock=self.clock, **more)
        self.server.start(lambda: self.status, last=last)

    def get(self, path: str, method: str = "GET") -> tuple[int, str, bytes]:
        """Return the status, the content type and the body of an answer."""
        connection = HTTPConnection(self.host, self.server.port, timeout=10)
        connection.request(method, path)
        answer = connection.getresponse()
        found = answer.status, answer.headers["Content-Type"], answer.read()
        connection.close()
        return found


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.server.close()


def test_each_path_is_served_and_others_name_those_that_exist(served: Served) -> None:
    status, content_type, body = served.get("/metrics?name=x")
    assert status == 200
    assert content_type.startswith("text/plain; version=")
    assert b'imds_bridge_deliveries_total{result="delivered",sink="ops"} 0.0\n' in body
    well = (200, "application/json", b'{"ok": true, "role": "forward", "reasons": []}\n')
    assert (served.get("/livez"), served.get("/readyz")) == (well, well)
    assert served.get("/")[::2] == (404, b"expected /metrics, /livez or /readyz\n")
    assert served.get("/livez", "HEAD")[::2] == (200, b"")


def test_what_is_not_ready_answers_503_with_the_reason_and_is_alive_unless_its_loop_makes_no_progress(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "status", replace(served.status, storage_error="disk full"))
    status, _, body = served.get("/readyz")
    reasons = ["the state cannot be written: disk full"]
    assert (status, json.loads(body)) == (503, {"ok": False, "role": "forward", "reasons": reasons})
    assert served.get("/livez")[0] == 200
    monkeypatch.setattr(metrics, "stalled_threads", lambda: ["poll"])
    status, _, body = served.get("/livez")
    assert (status, json.loads(body)["reasons"]) == (503, ["the loop poll makes no progress"])


def test_a_client_that_sends_nothing_blocks_no_other(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.server.port)):
        assert served.get("/livez")[0] == 200


@pytest.fixture
def four_ports() -> Iterator[int]:
    """Return the first of four ports in a row that nobody else is given."""
    with closing(ReservedPorts(4)) as ports:
        yield ports.first


def test_processes_with_one_configuration_take_one_port_after_the_other_and_keep_it(four_ports: int) -> None:
    def address(number: int) -> str:
        return f"127.0.0.1:{four_ports + number}"

    first, listen = Served(address(0)), Served(address(0), role="listen")
    assert (first.server.address, listen.server.address) == (address(0), address(1))
    assert (first.get("/livez")[0], listen.get("/livez")[0]) == (200, 200)
    for one in (first, listen):
        one.server.close()
    # The next boot starts them the other way round; forward returns to what is configured.
    listen = Served(address(0), role="listen", last=address(1))
    first = Served(address(0), last=address(2))
    assert (first.server.address, listen.server.address) == (address(0), address(1))
    others = [Served(address(0), role="relay", last="127.0.0.1:1") for _ in range(2)]
    assert [one.server.address for one in others] == [address(2), address(3)]
    for one in (first, listen, *others):
        one.server.close()


def test_an_address_that_cannot_be_used_is_noted_and_changes_nothing_else(
    four_ports: int, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as others, caplog.at_level(logging.ERROR):
        for port in range(four_ports, four_ports + 4):
            others.enter_context(socket.create_server(("127.0.0.1", port)))
        served = Served(f"127.0.0.1:{four_ports}")
    why = f"there are no metrics: 127.0.0.1:{four_ports + 3} cannot be listened on: Address already in use"
    assert (served.server.port, served.server.address, served.server.error) == (0, "", why)
    assert why in caplog.text
    served.server.close()
    foreign = Served("192.0.2.1:9464")
    assert foreign.server.error == (
        "there are no metrics: 192.0.2.1:9464 cannot be listened on: Cannot assign requested address"
    )


def test_where_a_probe_asks_the_port_the_second_role_takes_no_other_and_the_first_answers_for_itself_alone(
    four_ports: int,
) -> None:
    listen = f"127.0.0.1:{four_ports}"
    first = Served(listen, next_port=False)
    second = Served(listen, role="listen", next_port=False, last=f"127.0.0.1:{four_ports + 1}")
    why = f"there are no metrics: {listen} cannot be listened on: Address already in use"
    assert (second.server.address, second.server.error) == ("", why)
    for path in ("/livez", "/readyz"):
        assert [first.get(f"{path}{role}")[0] for role in ("", "?role=forward", "?role=listen")] == [
            200,
            200,
            404,
        ]
    first.server.close()


def test_ipv6_is_served() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    served = Served("[::1]:0")
    assert served.get("/livez")[0] == 200
    served.server.close()
