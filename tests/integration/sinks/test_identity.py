"""Sinks with the identity of the VM: where its token comes from, how long it is kept, and what fails without one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus import ServiceBusClient

from bridge.azure import credentials
from bridge.azure import servicebus as servicebus_module
from bridge.config.bus import EventGridSettings, IdentitySettings, ServiceBusSettings
from bridge.errors import DeliveryError, Misconfigured, Unavailable
from bridge.sinks.base import Sink
from bridge.sinks.eventgrid import EventGridSink
from bridge.sinks.servicebus import REST_SECONDS, ServiceBusSink
from tests.support.clock import MovedClock
from tests.support.eventgrid import EventGridLab
from tests.support.inbox import Inbox
from tests.support.servicebus import ServiceBusLab, entities
from tests.support.sinks import EVENT, QUEUE, TOKEN, TokenEndpoint, failure, set_proxy, webhook_sink


@dataclass(frozen=True, kw_only=True)
class Case:
    """A sink, the resource that its tokens are for, how many events have arrived, and a rest between two sends."""

    sink: Sink
    resource: str
    arrived: Callable[[], int]
    rest: Callable[[], object] = lambda: None


@pytest.fixture
def imds(monkeypatch: pytest.MonkeyPatch) -> Iterator[TokenEndpoint]:
    for name in ("AZURE_TENANT_ID", "AZURE_FEDERATED_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AZURE_CLIENT_ID", "of-the-environment")
    with TokenEndpoint() as started, TokenEndpoint() as proxy:
        monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", started.url)
        set_proxy(monkeypatch, proxy.url)
        yield started
        assert proxy.requests == []


def webhook(stack: ExitStack, folder: Path, **settings: Any) -> Case:
    inbox = stack.enter_context(Inbox())
    inbox.require_token(TOKEN)
    sink = webhook_sink(folder, inbox.url, token_scope="https://monitor.azure.com/.default", **settings)  # noqa: S106
    return Case(sink=sink, resource="https://monitor.azure.com", arrived=lambda: len(inbox.accepted))


def eventgrid(stack: ExitStack, _: Path, **settings: Any) -> Case:
    grid = stack.enter_context(EventGridLab())
    grid.require_token(TOKEN)
    given = EventGridSettings(kind="eventgrid", endpoint=grid.custom_endpoint, **settings)
    resource = "https://eventgrid.azure.net"
    return Case(sink=EventGridSink(given), resource=resource, arrived=lambda: len(grid.accepted))


def servicebus(stack: ExitStack, _: Path, **settings: Any) -> Case:
    """Build the case of a bus without TLS, which takes any token: the SDK and its request to IMDS are real."""
    bus = stack.enter_context(ServiceBusLab(entities()))
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    patch.setattr(servicebus_module, "ServiceBusClient", partial(ServiceBusClient, use_tls=False))
    clock = MovedClock()
    where = {"namespace": f"127.0.0.1:{bus.port}", "queue": QUEUE}
    sink = ServiceBusSink(ServiceBusSettings(kind="servicebus", **where, **settings), clock=clock)

    def rest() -> None:
        clock.advance(REST_SECONDS)
        sink.rest()  # a new connection follows

    def arrived() -> int:
        return len(bus.entity(QUEUE).messages)

    return Case(sink=sink, resource="https://servicebus.azure.net/", arrived=arrived, rest=rest)


Build = Callable[..., Case]


@pytest.fixture
def build(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Build]:
    """Build a case with these settings, whose token is never logged."""
    caplog.set_level(logging.DEBUG)
    with ExitStack() as stack:

        def build(kind: Build, **settings: Any) -> Case:
            made = kind(stack, tmp_path, **settings)
            stack.callback(made.sink.close)
            return made

        yield build
    assert TOKEN not in caplog.text


@pytest.mark.parametrize("kind", [webhook, eventgrid, servicebus])
@pytest.mark.parametrize(
    ("settings", "client_id"),
    [
        ({"client_id": "c-1"}, "c-1"),
        ({}, "of-the-environment"),
        ({"client_id": "c-1", "credential": "default"}, "c-1"),
    ],
    ids=["by its client id", "by the environment", "last of several credentials"],
)
def test_an_identity_gets_a_token_from_imds_without_a_proxy_and_keeps_it_until_the_reload(
    build: Build, imds: TokenEndpoint, kind: Build, settings: dict[str, Any], client_id: str
) -> None:
    case = build(kind, **settings)
    case.sink.send([EVENT])
    case.rest()
    case.sink.send([EVENT])
    assert len(imds.requests) == 1
    case.sink.reload()
    case.sink.send([EVENT])
    assert (len(imds.requests), case.arrived()) == (2, 3)
    asked = imds.requests[0].split()[1].partition("?")[2].split("&")
    assert {f"resource={case.resource}", f"client_id={client_id}"} <= set(asked)


def test_only_the_default_credential_asks_others_as_well() -> None:
    made = [
        credentials.make_credential(IdentitySettings(credential=name))
        for name in ("managed_identity", "default")
    ]
    assert [type(one).__name__ for one in made] == ["ManagedIdentityCredential", "ChainedTokenCredential"]


@pytest.mark.parametrize(
    ("kind", "answer", "error"),
    [
        (webhook, (400, 0.0), Misconfigured),
        (webhook, (429, 0.0), Unavailable),
        (webhook, (500, 0.0), Unavailable),
        (webhook, (200, 60.0), Unavailable),
        (eventgrid, (400, 0.0), Misconfigured),
        (eventgrid, (200, 60.0), Unavailable),
        (servicebus, (200, 60.0), Misconfigured),
    ],
)
def test_without_a_token_the_event_waits_for_one_and_the_reason_decides_how(
    build: Build, imds: TokenEndpoint, kind: Build, answer: tuple[int, float], error: type[DeliveryError]
) -> None:
    imds.answers.append(answer)
    case = build(kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(credentials._LIMITS, "read_timeout", 0.2)
        raised = failure(case.sink)
    assert (type(raised), raised.is_unreached, case.arrived()) == (error, True, 0)
    assert "no token for the identity" in str(raised)
    case.sink.reload()
    case.sink.send([EVENT])
    assert case.arrived() == 1
