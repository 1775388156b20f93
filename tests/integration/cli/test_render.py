"""`render`: each type of event as a sink would send it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from bridge.formats.samples import samples
from tests.support.cli import Cli

TYPES = [event.type for event in samples(datetime.now(UTC))]
HOOK = {"kind": "webhook", "url": "https://example.org/hook/secret-part?sig=topsecret"}
CONNECTION = "Endpoint=sb://x;SharedAccessKeyName=a;SharedAccessKey=topsecret"


@pytest.mark.parametrize(
    "sink",
    [
        {"kind": "stdout"},
        HOOK,
        {**HOOK, "mode": "binary"},
        {**HOOK, "mode": "batch"},
        {**HOOK, "format": "teams"},
        {**HOOK, "format": "slack"},
        {"kind": "webhook", "format": "pagerduty", "routing_key": "0123456789topsecret0123456789abc"},
        {**HOOK, "format": "template", "template": {"t": "{{ data }}"}},
        {"kind": "eventgrid", "endpoint": "https://example.org/api/events", "key": "topsecret"},
        {"kind": "servicebus", "connection_string": CONNECTION, "topic": "events"},
    ],
    ids=lambda sink: f"{sink['kind']}-{sink.get('format', sink.get('mode', ''))}",
)
def test_every_type_of_event_is_shown_as_it_is_sent_without_secrets(cli: Cli, sink: dict[str, Any]) -> None:
    cli.sinks(it=sink)
    done = cli("render")
    assert done.code == 0, done
    headings = [line.split()[1].rstrip(":") for line in done.out.splitlines() if line.startswith("# ")]
    assert headings == TYPES
    for unwanted in ("topsecret", "secret-part", "dead-lettered"):
        assert unwanted not in done.out


def test_text_that_equals_a_headers_value_is_shown_and_the_header_is_not(cli: Cli) -> None:
    cli.sinks(
        it={**HOOK, "headers": {"X-Kind": "Platform", "X-Key": "key-topsecret"}, "bearer_token": "token-1"}
    )
    shown = cli("render", "--type", "scheduledevent.scheduled").out
    assert '"EventSource":"Platform"' in shown
    assert "X-Kind: ***" in shown
    assert "topsecret" not in shown
    assert "token-1" not in shown


def test_the_exact_bytes_are_shown_or_indented_json(cli: Cli) -> None:
    cli.sinks(it={"kind": "stdout"})
    heading, body, *_ = cli("render", "--type", "scheduledevent.started").out.splitlines()
    assert heading == "# io.imdsbridge.scheduledevent.started.v1"
    laid_out = cli("render", "--type", "scheduledevent.started", "--indent").out.partition("\n")[2]
    assert json.loads(body)["data"].keys() == json.loads(laid_out)["data"].keys()
    assert laid_out.startswith('{\n  "specversion": "1.0",')


@pytest.mark.parametrize("indent", [(), ("--indent",)])
def test_an_event_for_which_nothing_is_sent_is_shown_as_such(cli: Cli, indent: tuple[str, ...]) -> None:
    key = "0123456789abcdef0123456789abcdef"
    cli.sinks(it={"kind": "webhook", "format": "pagerduty", "routing_key": key, "types": ["*"]})
    done = cli("render", "--type", "bridge.heartbeat", *indent)
    assert done.code == 0, done
    lines = done.out.strip().splitlines()
    assert lines == ["# io.imdsbridge.bridge.heartbeat.v1", "nothing is sent for this event"]
    assert "POST https://events.pagerduty.com/" in cli("render", "--type", "bridge.loss", *indent).out


def test_the_events_that_a_sink_does_not_take_are_named(cli: Cli) -> None:
    cli.sinks(it={"kind": "stdout", "where": {"EventType": "Terminate"}})
    done = cli("render", "--type", "scheduledevent.*")
    assert done.out.count("not sent, because of sinks.it.where: EventType is ") == 7


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--sink opps", "given --sink opps, expected one of ops, it"),
        ("", "given --sink nothing, expected one of ops, it"),
        ("--sink ops --type scheduled", "given --type scheduled, expected one of io.imdsbridge."),
    ],
)
def test_an_unknown_sink_or_type_exits_2_with_the_known_ones(cli: Cli, arguments: str, expected: str) -> None:
    cli.sinks(ops={"kind": "stdout"}, it={"kind": "stdout"})
    done = cli("render", *arguments.split())
    assert (done.code, expected in done.err) == (2, True)


@pytest.mark.parametrize("format_", ["teams", "slack"])
def test_a_digest_shows_all_types_as_one_message_with_links_to_the_console(cli: Cli, format_: str) -> None:
    cli.write(sinks={"it": {**HOOK, "format": format_}}, console_url="https://console.example.org")
    done = cli("render", "--digest")
    assert done.code == 0, done
    heading, *_, body = done.out.strip().splitlines()
    assert heading == "# a digest"
    text = json.dumps(json.loads(body), ensure_ascii=False)
    assert " events: " in text
    assert "https://console.example.org/event/" in text
    assert "secret-part" not in done.out


def test_a_sink_without_digests_has_none_to_show(cli: Cli) -> None:
    cli.sinks(it={"kind": "stdout"})
    done = cli("render", "--digest")
    assert done.code != 0
    assert "expected a sink for Teams or Slack instead of it" in done.err
