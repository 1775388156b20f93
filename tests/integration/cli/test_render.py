"""`render`, and settings that no command accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import Call, sinks
from tests.support.imds_lab import ImdsLab

EVENT_TYPES_IN_ORDER = [
    f"io.imdsbridge.{name}.v1"
    for name in (
        *(
            f"scheduledevent.{kind}"
            for kind in ("scheduled", "started", "updated", "completed", "canceled", "ended")
        ),
        *("document.changed", "imds.unreachable", "imds.recovered", "bridge.heartbeat", "bridge.loss"),
        *("approval.accepted", "approval.rejected", "approval.failed"),
    )
]


@pytest.mark.parametrize(
    "sink",
    [
        {"kind": "stdout"},
        {"kind": "webhook", "url": "https://example.org/hook/secret-part?sig=topsecret"},
        {"kind": "webhook", "mode": "binary", "url": "https://example.org/hook"},
        {"kind": "webhook", "mode": "batch", "url": "https://example.org/hook"},
        {"kind": "webhook", "format": "teams", "url": "https://example.org/hook?sig=topsecret"},
        {"kind": "webhook", "format": "slack", "url": "https://example.org/hook"},
        {"kind": "webhook", "format": "pagerduty", "routing_key": "0123456789topsecret0123456789abcd"[:32]},
        {
            "kind": "webhook",
            "format": "template",
            "url": "https://example.org/",
            "template": {"t": "{{ data }}"},
        },
        {"kind": "eventgrid", "endpoint": "https://example.org/api/events", "key": "topsecret"},
        {
            "kind": "servicebus",
            "connection_string": "Endpoint=sb://x;SharedAccessKeyName=a;SharedAccessKey=topsecret",
            "topic": "events",
        },
    ],
    ids=lambda sink: f"{sink['kind']}-{sink.get('format', sink.get('mode', ''))}",
)
def test_render_shows_every_type_of_event_as_it_is_sent_without_secrets(
    call: Call, config: Path, lab: ImdsLab, sink: dict[str, Any]
) -> None:
    sinks(config, lab, it=sink)
    done = call("render", "--config", config)
    assert done.code == 0, done
    headings = [line.split()[1].rstrip(":") for line in done.out.splitlines() if line.startswith("# ")]
    assert headings == EVENT_TYPES_IN_ORDER
    assert "topsecret" not in done.out
    assert "secret-part" not in done.out
    assert "dead-lettered" not in done.out


def test_render_shows_the_exact_bytes_or_indented_json(call: Call, config: Path, lab: ImdsLab) -> None:
    sinks(config, lab, it={"kind": "stdout"})
    arguments = ("render", "--type", "scheduledevent.started", "--config", config)
    heading, body, *_ = call(*arguments).out.splitlines()
    assert heading == "# io.imdsbridge.scheduledevent.started.v1"
    laid_out = call(*arguments, "--indent").out.partition("\n")[2]
    assert json.loads(body)["data"].keys() == json.loads(laid_out)["data"].keys()
    assert laid_out.startswith('{\n  "specversion": "1.0",')


def test_render_names_the_events_that_a_sink_does_not_take(call: Call, config: Path, lab: ImdsLab) -> None:
    sinks(config, lab, it={"kind": "stdout", "where": {"EventType": "Terminate"}})
    done = call("render", "--type", "scheduledevent.*", "--config", config)
    assert done.out.count("not sent, types, where or scope of [sinks.it] leave it out") == 6


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--sink", "opps"], "given --sink opps, expected one of ops, it"),
        ([], "given --sink nothing, expected one of ops, it"),
        (["--sink", "ops", "--type", "scheduled"], "given --type scheduled, expected one of io.imdsbridge."),
    ],
)
def test_render_of_an_unknown_sink_or_type_exits_2_with_the_known_ones(
    call: Call, config: Path, lab: ImdsLab, arguments: list[str], expected: str
) -> None:
    sinks(config, lab, ops={"kind": "stdout"}, it={"kind": "stdout"})
    done = call("render", *arguments, "--config", config)
    assert done.code == 2
    assert expected in done.err


@pytest.mark.parametrize(
    "faulty",
    [
        ({"format": "template", "template": {"text": "{{ data.EvntType }}"}}, "did you mean EventType?"),
        (
            {"format": "teams", "time_zone": "Europe/Berln"},
            "expected an IANA time zone such as Europe/Berlin",
        ),
        ({"format": "pagerduty"}, "routing_key: is missing (or routing_key_file)"),
        ({"types": ["io.imdsbridge.scheduledevent.starte?.v1"]}, "expected existing event types"),
        ({"max_per_second": 1e-11}, "max_per_second: given 1e-11, expected"),
        ({"where": {"EventTyp": ["Reboot"]}}, "did you mean EventType?"),
        ({"where": {"AffectsThisVm": "yes"}}, 'AffectsThisVm: given "yes", expected true or false'),
        ({"ca_file": "/etc/nothing.pem"}, 'ca_file: given "/etc/nothing.pem": No such file or directory'),
        (
            {"format": "pagerduty", "routing_key": "R0UT1NGKEY0123456789abcdefABCDEF", "types": ["*"]},
            "document.changed",
        ),
    ],
)
@pytest.mark.parametrize("command", ["forward", "check", "render"])
def test_settings_that_a_sink_cannot_use_are_a_configuration_error_with_the_remedy(
    call: Call, config: Path, lab: ImdsLab, command: str, faulty: tuple[dict[str, Any], str]
) -> None:
    sink, expected = faulty
    sinks(config, lab, ops={"kind": "webhook", "url": "https://example.org/", **sink})
    done = call(command, "--config", config)
    assert done.code == 2
    assert "sinks.ops" in done.err
    assert expected in done.err
