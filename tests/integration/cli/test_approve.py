"""`imds-bridge approve` against the lab's bus; with a listener behind it where that matters."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
from azure.servicebus.amqp import AmqpAnnotatedMessage

from bridge.cli import approve as module
from bridge.cli.approve import parse_duration
from bridge.config.loader import load
from bridge.errors import ConfigError
from bridge.http.signing import sign
from bridge.lab.rendering import SUBSCRIPTION_ID
from tests.support.bus import FLEET, QUEUE, SECRET, SUBSCRIPTION, TOPIC, BusRig, Sender, message, wait_settled
from tests.support.cli import Cli, CommandResult
from tests.support.imds_lab import ImdsLab
from tests.support.only import only
from tests.support.process import LIMIT_SECONDS, Forward, wait_until
from tests.support.servicebus import ServiceBusLab
from tests.support.undecodable import VALUES, send_encoded, with_body, with_property

NONSENSE: list[Any] = ["", "[1]", "{", '{"causationid": 1}', "null", "[" * 100_000]


def settings(imds: ImdsLab, bus: ServiceBusLab, **approvals: Any) -> dict[str, Any]:
    return {
        "imds": {"endpoint": imds.url("web-0")},
        "approvals": {
            "connection_string": bus.connection_string,
            "receipts_topic": TOPIC,
            "receipts_subscription": SUBSCRIPTION,
            "policy": {"allow": [{}]},
            "queue": QUEUE,
            **approvals,
        },
    }


@pytest.fixture
def approve(cli: Cli, imds: ImdsLab, bus: ServiceBusLab) -> Cli:
    """Return the command line of web-0."""
    cli.write(**settings(imds, bus))
    return cli


@dataclass
class Waiting:
    """The clock of `approve --wait`, which counts its looks at the receipts and can be past the command's end."""

    looks: int = 0
    ahead_seconds: float = 0.0
    is_resting: bool = False
    may_look: Lock = field(default_factory=Lock)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_seconds

    def sleep(self, _: float) -> None:
        self.is_resting = True
        with self.may_look:
            self.is_resting = False
            self.looks += 1
        time.sleep(0.01)

    def expire(self) -> None:
        """Let the command expire once what was sent so far has been seen."""
        before = self.looks
        wait_until(lambda: self.looks > before + 1)
        self.ahead_seconds = 3600

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let it look again only after the block."""
        with self.may_look:
            wait_until(lambda: self.is_resting)
            yield


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Waiting:
    clock = Waiting()
    monkeypatch.setattr(module, "time", clock)
    return clock


@contextmanager
def waiting_command(
    cli: Cli, bus: ServiceBusLab, *event_ids: str
) -> Iterator[tuple[str, Callable[[], CommandResult]]]:
    """Run `approve --wait` on a thread beside the block; yield the command's id, and what returns the result."""
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(cli, "approve", *event_ids, "--wait", "--expires", "60s")
        wait_until(lambda: bus.entity(QUEUE).messages or running.done())
        sent = only(bus.entity(QUEUE).messages)
        yield json.loads(sent.body)["id"], lambda: running.result(LIMIT_SECONDS)


def receipt(command_id: str, event_id: str, *, outcome: str = "Accepted", **data: Any) -> str:
    """Write a receipt as the listener would."""
    given = {"Outcome": outcome, "EventId": event_id, "Reason": "approved", "Detail": "", "Resources": []}
    type_ = f"io.imdsbridge.approval.{outcome.lower()}.v1"
    return json.dumps(
        {"specversion": "1.0", "type": type_, "causationid": command_id, "data": {**given, **data}}
    )


@pytest.mark.parametrize("session", ["{resource_group}.{vm}", "{subscription}.{vm}"])
def test_it_sends_a_signed_command_to_the_session_of_the_vm(
    tmp_path: Path, cli: Cli, imds: ImdsLab, bus: ServiceBusLab, session: str
) -> None:
    id_ = session.format(resource_group="lab", vm="web-1", subscription=SUBSCRIPTION_ID)
    cli.write(**settings(imds, bus, queue=FLEET, session=session, signing_secret=SECRET))
    event = imds.schedule(event_type="Reboot", resources=["web-1"])
    done = cli("approve", event, "--vm", "web-1", "--reason", "now")
    assert (done.code, done.err) == (0, "")
    assert f"for {event} to session {id_}" in done.out
    sent = only(bus.entity(FLEET).messages)
    envelope = json.loads(sent.body)
    assert sent.session_id == id_
    assert (sent.message_id, sent.subject) == (envelope["id"], "io.imdsbridge.command.approve.v1")
    assert envelope["data"]["EventIds"] == [event]
    assert (envelope["data"]["Vm"], envelope["data"]["Reason"]) == ("web-1", "now")
    rig = BusRig(tmp_path / "state", imds, bus, vm="web-1", queue=FLEET, session=session)
    rig.settings = load(cli.config, {}).approvals  # type: ignore[assignment]
    with rig:
        assert rig.receipt_of(envelope["id"])["Reason"] == "approved"
        wait_settled(bus, FLEET)


@pytest.mark.usefixtures("waiting")
def test_with_wait_it_ends_at_the_signed_receipt_and_believes_no_other(
    tmp_path: Path, cli: Cli, imds: ImdsLab, bus: ServiceBusLab
) -> None:
    sink = {"kind": "servicebus", "connection_string": bus.connection_string, "topic": TOPIC}
    given = {**settings(imds, bus, signing_secret=SECRET), "sinks": {"receipts": sink}}
    cli.write(**given)
    event = imds.schedule(event_type="Reboot", resources=["web-0", "web-1"])
    with waiting_command(cli, bus, event) as (command_id, finish):
        with Sender(bus, TOPIC) as sender:
            for properties in ({}, sign(["whsec_" + "A" * 32], "forged", datetime.now(UTC), b"")):
                body = receipt(command_id, event)
                sender.send(message(body, message_id="forged\x1b[2J", properties=properties))
        with Forward(tmp_path, given, role="listen"):
            done = finish()
    assert done.code == 0, done
    assert done.out.count("accepted: ") == 1
    assert f"accepted: {event}: approved; releases web-0, web-1" in done.out
    assert "the start may still wait for other VMs on the host" in done.out
    warning = r"warning: receipt forged\u001b[2J is not believed: "
    assert f"{warning}no webhook-id, webhook-timestamp, webhook-signature\n" in done.err
    assert f"{warning}the signature is by none of the known secrets\n" in done.err


def test_what_does_not_match_the_command_or_cannot_be_decoded_is_ignored(
    approve: Cli, bus: ServiceBusLab, waiting: Waiting
) -> None:
    with waiting_command(approve, bus, "E-1") as (command_id, finish), Sender(bus, TOPIC) as sender:
        forged = receipt(command_id, "E-1", Reason="forged").encode()
        with waiting.paused():  # what sends such messages changes the SDK
            for value in VALUES.values():
                send_encoded(sender, with_property(value, forged))
                send_encoded(sender, with_body(value))
        for body in (7, {"a": 1}, None):
            sender.send_one(AmqpAnnotatedMessage(value_body=body))
        last = receipt(command_id, "e-1", outcome="Rejected", Detail="\x1b[31m\nforged")
        sender.send(
            *map(message, (receipt("another", "E-1"), receipt(command_id, "E-2"), *NONSENSE)), message(last)
        )
        done = finish()
    assert (done.code, done.err) == (3, "")
    assert done.out.splitlines()[1:] == [r"rejected: e-1: approved (\u001b[31m\nforged)"]


@pytest.mark.parametrize(
    ("receipts", "expected"),
    [
        ({"receipts_topic": ""}, (2, "--wait needs receipts_topic and receipts_subscription")),
        ({"receipts_subscription": ""}, (2, "--wait needs receipts_topic and receipts_subscription")),
        ({"receipts_topic": "none"}, (1, "/none/audit: there is no such queue or topic")),
    ],
)
def test_without_receipts_to_wait_for_nothing_is_sent(
    cli: Cli, imds: ImdsLab, bus: ServiceBusLab, receipts: dict[str, str], expected: tuple[int, str]
) -> None:
    cli.write(**settings(imds, bus, **receipts))
    done = cli("approve", "E-1", "--wait")
    assert (done.code, bus.entity(QUEUE).messages) == (expected[0], ())
    assert expected[1] in done.err


@pytest.mark.usefixtures("waiting")
def test_with_wait_it_exits_with_4_after_a_dry_run(approve: Cli, bus: ServiceBusLab) -> None:
    with waiting_command(approve, bus, "E-1") as (command_id, finish), Sender(bus, TOPIC) as sender:
        sender.send(message(receipt(command_id, "E-1", DryRun=True)))
        done = finish()
    assert (done.code, "nothing was POSTed to IMDS" in done.err) == (4, True)
    assert "IMDS accepted" not in done.out


def test_with_wait_it_says_that_some_receipts_are_missing(
    approve: Cli, bus: ServiceBusLab, waiting: Waiting
) -> None:
    with waiting_command(approve, bus, "E-1", "E-2") as (command_id, finish):
        with Sender(bus, TOPIC) as sender:
            sender.send(message(receipt(command_id, "E-1")))
        waiting.expire()
        done = finish()
    assert (done.code, "only 1 of 2 receipts within 60s: of rejections, at most 100" in done.err) == (3, True)


def test_with_wait_it_says_when_no_receipt_comes(approve: Cli, bus: ServiceBusLab, waiting: Waiting) -> None:
    with waiting_command(approve, bus, "E-1") as (_, finish):
        waiting.expire()
        done = finish()
    assert (done.code, "no receipt within 60s" in done.err) == (3, True)


@pytest.mark.parametrize("answer", [("1", 1), ("all", 2), ("", 0), (None, 0)])
def test_without_ids_it_lists_the_scheduled_events_and_asks_where_there_is_a_terminal(
    approve: Cli,
    imds: ImdsLab,
    bus: ServiceBusLab,
    monkeypatch: pytest.MonkeyPatch,
    answer: tuple[str | None, int],
) -> None:
    typed, approved = answer
    for resources in (["web-0", "web-1"], ["web-0"]):
        imds.schedule(event_type="Reboot", resources=resources)
    monkeypatch.setattr("sys.stdin.isatty", lambda: typed is not None, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: typed)
    done = approve("approve")
    assert (done.code, "releases: web-0, web-1" in done.out) == (2 if typed is None else 0, True)
    sent = [json.loads(one.body)["data"]["EventIds"] for one in bus.entity(QUEUE).messages]
    assert sum(map(len, sent)) == approved


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        (["a b"], "EventId"),
        (["A", "a"], "an EVENT_ID is given twice"),
        (["x" * 201], "EventId"),
        ([""], "EventId"),
        ([f"E-{number}" for number in range(101)], "101 EventIds, expected 1 to 100"),
    ],
    ids=["with a space", "twice", "too long", "empty", "too many"],
)
def test_a_command_that_every_listener_would_refuse_is_not_sent(
    approve: Cli, bus: ServiceBusLab, ids: list[str], reason: str
) -> None:
    done = approve("approve", *ids)
    assert (done.code, bus.entity(QUEUE).messages) == (2, ())
    assert reason in done.err


def test_durations_are_read() -> None:
    durations = {"10m": 600, "90s": 90, "1h": 3600, "2": 120, "3min": 180}
    assert {text: parse_duration(text) for text in durations} == durations


@pytest.mark.parametrize("text", ["", "0", "0s", "-1m", "1.5h", "soon"])
def test_a_text_that_is_not_a_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a time"):
        parse_duration(text)


HERE = {"namespace": "a.servicebus.windows.net"}
SAME = {
    "connection_string": "Endpoint=sb://A.servicebus.windows.net/;SharedAccessKeyName=n;SharedAccessKey=k"
}


@pytest.mark.parametrize(
    ("sink", "approvals", "fault"),
    [
        ({**HERE, "queue": "Q"}, {**SAME, "queue": "q"}, "queue"),
        ({**HERE, "topic": "t"}, {**SAME, "topic": "T", "subscription": "s"}, "topic"),
        ({**HERE, "topic": "events"}, {**HERE, "queue": "q"}, ""),
        ({"namespace": "b.servicebus.windows.net", "queue": "q"}, {**HERE, "queue": "q"}, ""),
    ],
)
def test_a_sink_that_is_the_approvals_entity_is_a_fault(
    cli: Cli, sink: dict[str, str], approvals: dict[str, str], fault: str
) -> None:
    cli.write(sinks={"all": {"kind": "servicebus", **sink}}, approvals=approvals)
    text = rf"sinks\.all\.{fault}: .*the entity that \[approvals\] receives from"
    with pytest.raises(ConfigError, match=text) if fault else nullcontext():
        load(cli.config, {})
