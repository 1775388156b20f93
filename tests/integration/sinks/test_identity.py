"""Sinks with the identity of the VM: where its token comes from, what fails without one, and logs as a receiver."""

from __future__ import annotations

import logging
import re
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus import ServiceBusClient

from bridge.azure import credentials
from bridge.azure import servicebus as servicebus_module
from bridge.config.bus import EventGridSettings, ServiceBusSettings
from bridge.config.loader import load
from bridge.config.sinks import IdentitySettings
from bridge.errors import DeliveryError, Misconfigured, Rejected, Unavailable
from bridge.formats.samples import samples
from bridge.process.parts import build_sinks
from bridge.sinks.base import Sink
from bridge.sinks.eventgrid import EventGridSink
from bridge.sinks.servicebus import REST_SECONDS, ServiceBusSink
from bridge.sinks.webhook import WebhookSink
from tests.support.bicep import FOLDER
from tests.support.cli import Cli
from tests.support.clock import MovedClock
from tests.support.eventgrid import EventGridLab
from tests.support.inbox import Inbox
from tests.support.logs_ingestion import MAX_BYTES, LogsIngestion
from tests.support.only import only
from tests.support.pages import blocks
from tests.support.paths import ROOT
from tests.support.process import LIMIT_SECONDS, stored_event, toml
from tests.support.servicebus import ServiceBusLab, entities
from tests.support.settings import faults
from tests.support.sinks import EVENT, QUEUE, TOKEN, TokenEndpoint, failure, set_proxy, webhook_sink

SCOPE = "https://monitor.azure.com/.default"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A sink, the resource that its tokens are for, how many events have arrived, and a rest between two sends."""

    sink: Sink
    resource: str
    arrived: Callable[[], int]
    rest: Callable[[], object] = lambda: None


@pytest.fixture
def tokens(monkeypatch: pytest.MonkeyPatch) -> Iterator[TokenEndpoint]:
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
    sink = webhook_sink(folder, inbox.url, token_scope=SCOPE, **settings)
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
    where: dict[str, Any] = {"namespace": f"127.0.0.1:{bus.port}", "queue": QUEUE}
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
    build: Build, tokens: TokenEndpoint, kind: Build, settings: dict[str, Any], client_id: str
) -> None:
    case = build(kind, **settings)
    case.sink.send([EVENT])
    case.rest()
    case.sink.send([EVENT])
    assert len(tokens.requests) == 1
    case.sink.reload()
    case.sink.send([EVENT])
    assert (len(tokens.requests), case.arrived()) == (2, 3)
    asked = tokens.requests[0].split()[1].partition("?")[2].split("&")
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
    build: Build, tokens: TokenEndpoint, kind: Build, answer: tuple[int, float], error: type[DeliveryError]
) -> None:
    tokens.answers.append(answer)
    case = build(kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(credentials._LIMITS, "read_timeout", 0.2 if answer[1] else LIMIT_SECONDS)
        raised = failure(case.sink)
    assert (type(raised), raised.is_unreached, case.arrived()) == (error, True, 0)
    assert "no token for the identity" in str(raised)
    case.sink.reload()
    case.sink.send([EVENT])
    assert case.arrived() == 1


# --- a webhook into a simulated Logs Ingestion API ---


RESERVED = {"id", "Type", "Title", "TenantId", "SourceSystem", "RawData", "Computer"}


def recipe() -> dict[str, Any]:
    """Return the sink of the page."""
    text = only(one.text for one in blocks(ROOT / "docs/delivery.md") if "token_scope" in one.text)
    return dict(tomllib.loads(text)["sinks"]["logs"])


@pytest.fixture(scope="module")
def server() -> Iterator[LogsIngestion]:
    with LogsIngestion(TOKEN) as started:
        yield started


@pytest.fixture
def logs(server: LogsIngestion) -> LogsIngestion:
    """Return the API as if it had just been started: its server takes half a second to end."""
    server.token = TOKEN
    server.rows.clear()
    server.answers.clear()
    return server


@pytest.fixture
def sink(logs: LogsIngestion, tmp_path: Path) -> Iterator[WebhookSink]:
    """Return the sink of the page with the URL of the simulated API."""
    file = tmp_path / "config.toml"
    file.write_text(toml({"sinks": {"logs": {**recipe(), "url": logs.url}}}))
    with closing(build_sinks(load(file, {}).sinks)["logs"]) as built:
        assert isinstance(built, WebhookSink)
        yield built


def columns() -> set[str]:
    """Return the columns of the Bicep module."""
    text = (FOLDER / "modules/loganalytics.bicep").read_text()
    return set(re.findall(r"name: '(\w+)'\n +type:", text.partition("var columns")[2].partition("\n]")[0]))


@pytest.mark.usefixtures("tokens")
def test_each_event_of_the_page_is_a_row_in_the_columns_of_the_module(
    logs: LogsIngestion, sink: WebhookSink
) -> None:
    late = datetime.now(UTC) - timedelta(days=3)  # Azure replaces its TimeGenerated
    chosen = [one for one in samples(late) if ".scheduledevent." in one.type]
    assert len(chosen) == 7
    for event in chosen:
        sink.send([event])
    assert logs.answers == [204] * 7
    assert [row["CloudEventType"] for row in logs.rows] == [one.type for one in chosen]
    for row, event in zip(logs.rows, chosen, strict=True):
        assert row.keys() == columns()
        assert row["Resources"] == event.envelope["data"]["Resources"]
        assert datetime.fromisoformat(row["TimeGenerated"]) > late + timedelta(days=2)
        assert row["CloudEventTime"] == event.envelope["time"]
    assert not columns() & RESERVED


@pytest.mark.usefixtures("tokens")
def test_a_refused_token_names_the_role_and_shows_no_token(
    logs: LogsIngestion, sink: WebhookSink, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    logs.token = ""
    error = failure(sink)
    assert type(error) is Misconfigured
    assert "lacks a role: Monitoring Metrics Publisher on the data collection rule" in str(error)
    assert TOKEN not in f"{error}{error.__cause__}{caplog.text}"


@pytest.mark.usefixtures("tokens")
def test_a_row_above_the_limit_is_a_dead_letter_and_says_nothing_of_a_role(sink: WebhookSink) -> None:
    error = failure(sink, stored_event(1, Resources=["x" * MAX_BYTES]))
    assert (type(error), error.status) == (Rejected, 413)
    assert "role" not in str(error)


@pytest.mark.usefixtures("tokens")
def test_check_names_scope_and_sink_and_render_hides_the_header(logs: LogsIngestion, cli: Cli) -> None:
    cli.sinks(logs={**recipe(), "url": logs.url})
    row = cli.check().row(check="sink logs")
    assert (row["result"], SCOPE in row["message"]) == ("ok", True)
    asked = len(logs.answers)
    shown = cli("render", "--type", "scheduledevent.started").out
    assert "Authorization: ***" in shown
    assert TOKEN not in f"{row}{shown}"
    assert len(logs.answers) == asked


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        (
            {"bearer_token": "abc"},
            "sinks.ops.token_scope: expected neither bearer_token nor a header Authorization",
        ),
        ({"headers": {"authorization": "Basic abc"}}, "sinks.ops.token_scope: expected neither bearer_token"),
        ({"url": "http://example.org", "allow_http": True}, "sinks.ops.url: "),
        ({"token_scope": "https://monitor.azure.com"}, "sinks.ops.token_scope: given"),
    ],
)
def test_what_contradicts_or_would_show_a_token_is_refused(
    tmp_path: Path, more: dict[str, Any], fault: str
) -> None:
    given = {"kind": "webhook", "url": "https://example.org/hook", "token_scope": SCOPE, **more}
    assert only(faults(tmp_path, toml({"sinks": {"ops": given}}))).startswith(fault)
