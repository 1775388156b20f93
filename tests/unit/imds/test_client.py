"""What IMDS is sent and how long it is waited for: on a moved clock, over a connection that a double plays."""

from __future__ import annotations

import io
import json
import math
import socket
from email.utils import format_datetime
from typing import Any

import pytest

from bridge.config.models import ImdsSettings
from bridge.errors import ImdsError
from bridge.imds import client as client_module
from bridge.imds.client import ImdsClient
from tests.support.clock import MovedClock
from tests.support.only import only

ANSWER = b'HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n{"name":"x"}'


class LateAnswer(io.BytesIO):
    """Plays a connection on which nothing arrives in time."""

    def readline(self, *_: object) -> bytes:
        raise TimeoutError


class SlowImds:
    """Plays the connection to an IMDS that answers after `lag_seconds`.

    `limits` has how long each request waited, `sent` what was sent.
    """

    def __init__(self, clock: MovedClock) -> None:
        self.clock = clock
        self.lag_seconds = 0.0
        self.limits: list[float] = []
        self.sent: list[bytes] = []
        self.limit_seconds = 0.0

    def settimeout(self, seconds: float) -> None:
        self.limit_seconds = seconds

    def makefile(self, _: str) -> io.BytesIO:
        self.limits.append(round(self.limit_seconds))
        self.clock.advance(min(self.lag_seconds, self.limit_seconds))
        return LateAnswer() if self.lag_seconds > self.limit_seconds else io.BytesIO(ANSWER)

    def select(self, *given: Any) -> tuple[list[Any], ...]:
        """Play that nothing arrives on any of the connections."""
        if given[3]:
            self.limits.append(round(given[3]))
            self.clock.advance(given[3])
        return [], [], []

    def sendall(self, data: bytes) -> None:
        self.sent.append(data)

    def setsockopt(self, *_: object) -> None:
        """Take the option."""

    def close(self) -> None:
        """Close nothing."""

    def waited(self) -> list[float]:
        """Return the limits since the last call of this."""
        limits, self.limits = self.limits, []
        return limits


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowImds:
    imds = SlowImds(MovedClock())
    monkeypatch.setattr(client_module, "time", imds.clock)
    monkeypatch.setattr(client_module, "select", imds)
    monkeypatch.setattr(socket, "create_connection", lambda *_: imds)
    return imds


@pytest.fixture
def client(slow: SlowImds) -> ImdsClient:
    return ImdsClient(ImdsSettings(endpoint="http://imds.invalid"), clock=slow.clock)


def test_a_request_is_repeated_after_twice_the_time_each_up_to_ten_seconds(
    slow: SlowImds, client: ImdsClient
) -> None:
    slow.lag_seconds = math.inf
    waiting: list[None] = []
    with pytest.raises(ImdsError, match="no complete answer"):
        client.document(timeout_seconds=130, waiting=lambda: waiting.append(None))
    assert slow.waited() == [2, 4, 8, *[10] * 11, 6]
    assert len(waiting) == 14
    slow.lag_seconds = 0
    client.instance()
    client.document(timeout_seconds=1)
    assert slow.waited() == [2, 1]


def test_a_slow_imds_is_given_time_until_it_is_quick_again(slow: SlowImds, client: ImdsClient) -> None:
    asked = []
    for slow.lag_seconds in (3, 3, 3.9, 2, 1.9, 1.9):
        client.document()
        asked.append(slow.waited())
    assert asked == [[2, 4], [4], [4], [4], [4], [2]]


@pytest.mark.parametrize(
    ("version", "more"),
    [("2017-03-01", {"DocumentIncarnation": 5}), ("2017-08-01", {}), ("2020-07-01", {})],
)
def test_an_approval_names_events_and_maybe_incarnation(
    slow: SlowImds, version: str, more: dict[str, int]
) -> None:
    settings = ImdsSettings.model_validate({"endpoint": "http://imds.invalid", "api_version": version})
    ImdsClient(settings, clock=slow.clock).approve(["A", "b"], incarnation=5)
    head, _, content = only(slow.sent).partition(b"\r\n\r\n")
    assert head.startswith(f"POST /metadata/scheduledevents?api-version={version} HTTP/1.1".encode())
    assert json.loads(content) == {"StartRequests": [{"EventId": "A"}, {"EventId": "b"}], **more}
    assert slow.waited() == [10]


def test_the_clock_is_compared_with_imds_at_every_moment_since_its_last_answer(
    slow: SlowImds, client: ImdsClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.clock_ahead_seconds is None
    date = f"HTTP/1.1 200 OK\r\nDate: {format_datetime(slow.clock.now(), usegmt=True)}\r\n".encode()
    monkeypatch.setattr(f"{__name__}.ANSWER", ANSWER.replace(b"HTTP/1.1 200 OK\r\n", date))
    client.document()
    slow.clock.advance(3600)  # IMDS answers no more
    assert client.clock_ahead_seconds == 0
    slow.clock.jump(1200)
    assert client.clock_ahead_seconds == 1200
    slow.clock.jump(-1290)
    assert client.clock_ahead_seconds == -90
