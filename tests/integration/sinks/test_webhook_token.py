"""Webhooks with a token of the identity, into a simulated Logs Ingestion API."""

from __future__ import annotations

import logging
import re
import tomllib
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from bridge.config.loader import load
from bridge.errors import Misconfigured, Rejected
from bridge.formats.samples import samples
from bridge.service.parts import build_sinks
from bridge.sinks.webhook import WebhookSink
from tests.support.bicep import FOLDER
from tests.support.cli import Cli
from tests.support.logs_ingestion import MAX_BYTES, LogsIngestion
from tests.support.only import only
from tests.support.pages import blocks
from tests.support.paths import ROOT
from tests.support.process import stored_event, toml
from tests.support.settings import faults
from tests.support.sinks import TOKEN, TokenEndpoint, failure

SCOPE = "https://monitor.azure.com/.default"
RESERVED = {"id", "Type", "Title", "TenantId", "SourceSystem", "RawData", "Computer"}


def recipe() -> dict[str, Any]:
    """Return the sink of the page."""
    text = only(one.text for one in blocks(ROOT / "docs/delivery.md") if "token_scope" in one.text)
    return dict(tomllib.loads(text)["sinks"]["logs"])


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> Iterator[TokenEndpoint]:
    with TokenEndpoint() as started:
        monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", started.url)
        yield started


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


def test_a_refused_token_names_the_role_and_shows_no_token(
    logs: LogsIngestion, sink: WebhookSink, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    logs.token = ""
    error = failure(sink)
    assert type(error) is Misconfigured
    assert "lacks a role: Monitoring Metrics Publisher on the data collection rule" in str(error)
    assert TOKEN not in f"{error}{error.__cause__}{caplog.text}"


def test_a_row_above_the_limit_is_a_dead_letter_and_says_nothing_of_a_role(sink: WebhookSink) -> None:
    error = failure(sink, stored_event(1, Resources=["x" * MAX_BYTES]))
    assert (type(error), error.status) == (Rejected, 413)
    assert "role" not in str(error)


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
