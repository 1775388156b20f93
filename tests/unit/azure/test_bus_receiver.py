"""The receiver against an SDK that hangs or fails, without a bus."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from azure.servicebus.exceptions import MessageLockLostError

from bridge.azure import bus_receiver
from bridge.azure.bus_receiver import BusReceiver, try_to_receive
from bridge.azure.receiver import ReceivedMessage
from bridge.config.base import Secret
from bridge.config.bus import ReceiverSettings
from bridge.errors import HungError, Unavailable
from bridge.runtime.threads import Stop, start_thread
from bridge.runtime.time import Clock

LIMIT_SECONDS = 20.0


class FakeSdk:
    """Stands in for client and receiver; `on_open` and `on_receive` are what the calls do."""

    session: Any = None

    def __init__(self) -> None:
        self._handler = SimpleNamespace(_shutdown=False, _connection=None)
        self.released = threading.Event()
        self.on_open: Callable[[], None] = lambda: None
        self.on_receive: Callable[[], None] = lambda: None
        self.opened = 0

    def hang(self) -> None:
        """Return only when the test ends."""
        self.released.wait(LIMIT_SECONDS)

    def get_queue_receiver(self, _: str, **__: Any) -> FakeSdk:
        return self

    def __enter__(self) -> FakeSdk:
        self.opened += 1
        self.on_open()
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def peek_messages(self, *_: Any, **__: Any) -> list[Any]:
        return []

    def receive_messages(self, **_: Any) -> list[Any]:
        self.on_receive()
        return []

    def close(self) -> None:
        """Nothing is open."""

    def _close_handler(self) -> None:
        """Close nothing."""


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSdk]:
    fake = FakeSdk()
    monkeypatch.setattr(bus_receiver, "connect", lambda *_, **__: fake)
    for name in ("IDLE_SECONDS", "RETRY_LIMIT_SECONDS", "STOP_SECONDS"):
        monkeypatch.setattr(bus_receiver, name, 0.02)
    monkeypatch.setattr(bus_receiver, "OPEN_SECONDS", LIMIT_SECONDS)
    yield fake
    fake.released.set()


@pytest.fixture
def stop() -> Stop:
    return Stop()


@pytest.fixture
def receiver(stop: Stop) -> BusReceiver:
    settings = ReceiverSettings(connection_string=Secret("Endpoint=sb://nowhere"), queue="q")
    return BusReceiver(settings, what="commands", clock=Clock(), stop=stop)


@pytest.mark.parametrize("call", ["on_open", "on_receive"])
def test_calls_that_hang_end_run_once_there_are_too_many(
    sdk: FakeSdk,
    receiver: BusReceiver,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    monkeypatch.setattr(bus_receiver, "OPEN_SECONDS", 0.5)
    setattr(sdk, call, sdk.hang)
    with pytest.raises(HungError) as caught:
        receiver.run()
    assert caught.value.final
    assert sdk.opened == 3
    assert len([line for line in caplog.messages if "no commands can be received" in line]) == 1


def test_a_call_that_hangs_does_not_delay_the_stop(sdk: FakeSdk, receiver: BusReceiver, stop: Stop) -> None:
    hanging = threading.Event()

    def hang() -> None:
        hanging.set()
        sdk.hang()

    sdk.on_receive = hang
    thread = start_thread("commands", receiver.run)
    assert hanging.wait(LIMIT_SECONDS)
    stop.set()
    thread.join(LIMIT_SECONDS / 2)
    assert not thread.is_alive()


def test_any_error_of_the_sdk_is_shown_and_the_connection_is_opened_again(
    sdk: FakeSdk, receiver: BusReceiver, stop: Stop
) -> None:
    shown: list[str | None] = []

    def fail_twice() -> None:
        shown.append(receiver.status()["last_error"])
        if len(shown) <= 2:
            raise TypeError("unexpected")
        if len(shown) == 5:
            stop.set()

    sdk.on_receive = fail_twice
    receiver.run()
    assert sdk.opened == 3
    assert shown[0] is None
    assert "unexpected" in (shown[1] or "")
    assert shown[-1] is None


def test_nothing_is_opened_while_the_session_is_not_known(sdk: FakeSdk, stop: Stop) -> None:
    asked: list[None] = []

    def session() -> str | None:
        asked.append(None)
        if len(asked) == 3:
            stop.set()
        return None

    settings = ReceiverSettings(connection_string=Secret("Endpoint=sb://nowhere"), queue="q")
    BusReceiver(settings, what="commands", session=session, clock=Clock(), stop=stop).run()
    assert sdk.opened == 0


def test_a_receiver_that_the_sdk_has_shut_is_a_failure_and_is_opened_again(
    sdk: FakeSdk, receiver: BusReceiver, stop: Stop, caplog: pytest.LogCaptureFixture
) -> None:
    shown: list[str | None] = []

    def shut() -> None:
        shown.append(receiver.status()["last_error"])
        sdk._handler._shutdown = len(shown) == 1
        if len(shown) == 3:
            stop.set()

    sdk.on_receive = shut
    receiver.run()
    assert "the SDK has closed its receiver" in (shown[1] or "")
    assert shown[2] is None
    assert sdk.opened == 2
    assert "the SDK has closed its receiver" in caplog.text


def test_a_check_does_not_take_a_receiver_that_the_sdk_has_shut_for_one_that_receives(sdk: FakeSdk) -> None:
    settings = ReceiverSettings(connection_string=Secret("Endpoint=sb://nowhere"), queue="q")
    sdk._handler._shutdown = True
    with pytest.raises(Unavailable, match="the SDK has closed its receiver"):
        try_to_receive(settings, what="commands")


def test_one_lost_lock_does_not_keep_others_from_being_renewed(
    receiver: BusReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [
        ReceivedMessage(
            body=b"",
            message_id=str(number),
            properties={},
            enqueued_at=None,
            sequence_number=number,
            generation=0,
            handle=number,
        )
        for number in range(3)
    ]
    requests: list[list[int]] = []

    def renew(_: object, handles: list[int]) -> list[datetime]:
        requests.append(handles)
        if 1 in handles:
            raise MessageLockLostError
        return [datetime.now(UTC) + timedelta(seconds=60) for _ in handles]

    monkeypatch.setattr(bus_receiver, "renew_locks", renew)
    receiver._unsettled = dict.fromkeys(messages, 0.0)
    receiver._renew_messages(messages)
    assert requests == [[0, 1, 2], [0], [1], [2]]
    assert [one.message_id for one in receiver._unsettled] == ["0", "2"]
    assert all(renew_at > 0 for renew_at in receiver._unsettled.values())
