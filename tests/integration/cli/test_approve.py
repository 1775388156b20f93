"""`imds-bridge approve` as a process, against the lab's bus with a listener behind it."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.amqp import AmqpAnnotatedMessage

from bridge.cli.approve import parse_duration
from bridge.config.loader import load
from bridge.errors import ConfigError
from bridge.http.signing import sign
from tests.process.test_listen_kill import Listen
from tests.support.bus import (
    FLEET,
    QUEUE,
    SECRET,
    SUBSCRIPTION,
    TOPIC,
    Rig,
    Sender,
    bus_config,
    wait_settled,
)
from tests.support.imds_lab import ImdsLab
from tests.support.process import COMMAND, LIMIT_SECONDS, environment, run, toml, wait_until
from tests.support.servicebus import ServiceBusLab
from tests.support.undecodable import VALUES, send_encoded, with_body, with_property


@pytest.fixture
def imds() -> Iterator[ImdsLab]:
    with ImdsLab(vms=("web-0", "web-1")) as lab:
        yield lab


@pytest.fixture
def bus() -> Iterator[ServiceBusLab]:
    with ServiceBusLab(bus_config()) as lab:
        yield lab


def settings(imds: ImdsLab, bus: ServiceBusLab, **approvals: Any) -> dict[str, Any]:
    return {
        "imds": {"endpoint": imds.url("web-0")},
        "approvals": {
            "connection_string": bus.connection_string,
            "receipts_topic": TOPIC,
            "receipts_subscription": SUBSCRIPTION,
            "policy": {"allow": [{}]},
            **({} if "queue" in approvals else {"queue": QUEUE}),
            **approvals,
        },
    }


NONSENSE: list[Any] = ["", "[1]", "{", '{"causationid": 1}', "null", "[" * 100_000]


@contextmanager
def waiting_command(config: Path, event_id: str) -> Iterator[subprocess.Popen[str]]:
    """Run `approve --wait` beside the test."""
    command = subprocess.Popen(
        [*COMMAND, "approve", event_id, "--wait", "--expires", "60s", "--config", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    with command:
        yield command
        command.kill()


def sent_command(bus: ServiceBusLab) -> dict[str, Any]:
    """Return the command, once it is on the queue."""
    wait_until(lambda: bus.entity(QUEUE).messages)
    (sent,) = bus.entity(QUEUE).messages
    envelope: dict[str, Any] = json.loads(sent.body)
    return envelope


def receipt(command_id: str, event_id: str, *, outcome: str = "Accepted", **data: Any) -> str:
    """Write a receipt as the listener would."""
    given = {"Outcome": outcome, "EventId": event_id, "Reason": "approved", "Detail": "", "Resources": []}
    envelope = {
        "specversion": "1.0",
        "type": f"io.imdsbridge.approval.{outcome.lower()}.v1",
        "causationid": command_id,
        "data": {**given, **data},
    }
    return json.dumps(envelope)


def send_receipt(bus: ServiceBusLab, body: str, **message: Any) -> None:
    """Put a message onto the topic of receipts."""
    properties = message.pop("properties", None)
    with (
        ServiceBusClient.from_connection_string(bus.connection_string) as client,
        client.get_topic_sender(TOPIC) as sender,
    ):
        sender.send_messages(ServiceBusMessage(body, application_properties=properties, **message))


def write(folder: Path, given: dict[str, Any]) -> Path:
    path = folder / "approve.toml"
    path.write_text(toml(given))
    return path


def test_it_sends_a_signed_command_to_the_session_of_the_vm(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab
) -> None:
    options: dict[str, Any] = {"queue": FLEET, "session": "{resource_group}.{vm}", "signing_secret": SECRET}
    config = write(tmp_path, settings(imds, bus, **options))
    event = imds.schedule(event_type="Reboot", resources=["web-1"])
    done = run("approve", event, "--vm", "web-1", "--reason", "now", "--config", config)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"for {event} to session lab.web-1" in done.stdout
    (sent,) = bus.entity(FLEET).messages
    envelope = json.loads(sent.body)
    assert sent.session_id == "lab.web-1"
    assert (sent.message_id, sent.subject) == (envelope["id"], "io.imdsbridge.command.approve.v1")
    assert envelope["data"]["EventIds"] == [event]
    assert (envelope["data"]["Vm"], envelope["data"]["Reason"]) == ("web-1", "now")
    rig = Rig(tmp_path / "state", imds, bus, vm="web-1", queue=FLEET, session="{resource_group}.{vm}")
    rig.settings = load(config, {}).approvals  # type: ignore[assignment]
    with rig:
        assert rig.receipt_of(envelope["id"])["Reason"] == "approved"
        wait_settled(bus, FLEET)


def test_with_wait_it_ends_at_the_receipt_and_explains_it(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab
) -> None:
    sink = {"kind": "servicebus", "connection_string": bus.connection_string, "topic": TOPIC}
    policy = {"allow": [{}], "deny": [{"event_type": ["Redeploy"]}]}
    given = {**settings(imds, bus, policy=policy), "sinks": {"receipts": sink}}
    event = imds.schedule(event_type="Reboot", resources=["web-0", "web-1"])
    denied = imds.schedule(event_type="Redeploy", resources=["web-0"])
    with Listen(tmp_path, given) as listen:
        accepted = run("approve", event, "--wait", "--config", listen.config)
        refused = run("approve", denied, "--wait", "--config", listen.config)
    assert accepted.returncode == 0, accepted
    assert f"accepted: {event}: approved; releases web-0, web-1" in accepted.stdout
    assert "the start may still wait for other VMs on the host" in accepted.stdout
    assert refused.returncode == 3, refused
    assert f"rejected: {denied}: denied" in refused.stdout


def test_with_signing_secrets_receipts_are_signed_and_only_those_are_believed(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab
) -> None:
    sink = {"kind": "servicebus", "connection_string": bus.connection_string, "topic": TOPIC}
    given = {**settings(imds, bus, signing_secret=SECRET), "sinks": {"receipts": sink}}
    event = imds.schedule(event_type="Reboot", resources=["web-0"])
    config = write(tmp_path, given)
    with waiting_command(config, event) as command:
        envelope = sent_command(bus)
        for signature in ({}, sign(["whsec_" + "A" * 32], "forged", datetime.now(UTC), b"")):
            send_receipt(
                bus, receipt(envelope["id"], event), properties=signature, message_id="forged\x1b[2J"
            )
        with Listen(tmp_path, given):
            out, err = command.communicate(timeout=LIMIT_SECONDS)
    assert command.returncode == 0, (out, err)
    assert out.count("accepted: ") == 1
    warning = r"warning: receipt forged\u001b[2J is not believed: "
    assert f"{warning}no webhook-id, webhook-timestamp, webhook-signature\n" in err
    assert f"{warning}the signature is by none of the known secrets\n" in err


def test_a_receipt_that_does_not_match_the_command_is_ignored(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab
) -> None:
    config = write(tmp_path, settings(imds, bus))
    with waiting_command(config, "E-1") as command:
        envelope = sent_command(bus)
        send_receipt(bus, receipt("another", "E-1"))
        send_receipt(bus, receipt(envelope["id"], "E-2"))
        for body in NONSENSE:
            send_receipt(bus, body)
        send_receipt(bus, receipt(envelope["id"], "e-1", outcome="Rejected", Detail="\x1b[31m\nforged"))
        out, err = command.communicate(timeout=LIMIT_SECONDS)
    assert (command.returncode, err) == (3, "")
    assert out.splitlines()[1:] == [r"rejected: e-1: approved (\u001b[31m\nforged)"]


def test_messages_that_the_sdk_cannot_decode_do_not_hide_the_receipt(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab
) -> None:
    config = write(tmp_path, settings(imds, bus))
    with waiting_command(config, "E-1") as command, Sender(bus, TOPIC) as sender:
        envelope = sent_command(bus)
        for value in VALUES.values():
            send_encoded(
                sender, with_property(value, receipt(envelope["id"], "E-1", Reason="forged").encode())
            )
            send_encoded(sender, with_body(value))
        for body in (7, {"a": 1}, None):
            sender.send_one(AmqpAnnotatedMessage(value_body=body))
        send_receipt(bus, receipt(envelope["id"], "E-1"))
        out, err = command.communicate(timeout=LIMIT_SECONDS)
    assert (command.returncode, err) == (0, "")
    assert out.count("accepted: E-1: approved\n") == 1


@pytest.mark.parametrize(
    ("receipts", "expected"),
    [
        ({"receipts_topic": ""}, (2, "--wait needs receipts_topic and receipts_subscription")),
        ({"receipts_subscription": ""}, (2, "--wait needs receipts_topic and receipts_subscription")),
        ({"receipts_topic": "none"}, (1, "/none/audit: there is no such queue or topic")),
    ],
)
def test_without_receipts_to_wait_for_nothing_is_sent(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, receipts: dict[str, str], expected: tuple[int, str]
) -> None:
    done = run("approve", "E-1", "--wait", "--config", write(tmp_path, settings(imds, bus, **receipts)))
    assert done.returncode == expected[0]
    assert expected[1] in done.stderr
    assert bus.entity(QUEUE).messages == ()


def test_with_wait_it_says_when_no_receipt_comes(tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab) -> None:
    done = run(
        "approve", "E-1", "--wait", "--expires", "1s", "--config", write(tmp_path, settings(imds, bus))
    )
    assert done.returncode == 3
    assert "no receipt within 1s" in done.stderr


@pytest.mark.parametrize(("answer", "approved"), [("1", 1), ("all", 2), ("", 0)])
def test_without_ids_it_lists_the_scheduled_events_and_asks(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, answer: str, approved: int
) -> None:
    for resources in (["web-0", "web-1"], ["web-0"]):
        imds.schedule(event_type="Reboot", resources=resources)
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "wb", buffering=0) as terminal, os.fdopen(theirs, "rb") as stdin:
        terminal.write(f"{answer}\n".encode())
        done = subprocess.run(
            [*COMMAND, "approve", "--config", str(write(tmp_path, settings(imds, bus)))],
            stdin=stdin,
            capture_output=True,
            text=True,
            env=environment(),
            timeout=LIMIT_SECONDS,
            check=False,
        )
    assert done.returncode == 0, done
    assert "releases: web-0, web-1" in done.stdout
    sent = [json.loads(one.body)["data"]["EventIds"] for one in bus.entity(QUEUE).messages]
    assert sum(map(len, sent)) == approved


def test_without_ids_and_without_a_terminal_it_fails(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab
) -> None:
    imds.schedule(event_type="Reboot", resources=["web-0"])
    done = run("approve", "--config", write(tmp_path, settings(imds, bus)))
    assert done.returncode == 2
    assert bus.entity(QUEUE).messages == ()


@pytest.mark.parametrize("ids", [["a b"], ["A", "a"], ["x" * 201], [""]])
def test_a_command_that_every_listener_would_refuse_is_not_sent(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, ids: list[str]
) -> None:
    done = run("approve", *ids, "--config", write(tmp_path, settings(imds, bus)))
    assert done.returncode == 2, done
    assert bus.entity(QUEUE).messages == ()


@pytest.mark.parametrize(
    ("text", "seconds"), [("10m", 600), ("90s", 90), ("1h", 3600), ("2", 120), ("3min", 180)]
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0s", "-1m", "1.5h", "soon"])
def test_a_text_that_is_not_a_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a time"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("sink", "approvals"),
    [
        (
            {"namespace": "a.servicebus.windows.net", "queue": "Q"},
            {"namespace": "A.servicebus.windows.net", "queue": "q"},
        ),
        (
            {"namespace": "a.servicebus.windows.net", "topic": "t"},
            {
                "connection_string": "Endpoint=sb://a.servicebus.windows.net/;SharedAccessKeyName=n;SharedAccessKey=k",
                "topic": "T",
                "subscription": "s",
            },
        ),
    ],
)
def test_a_sink_that_is_the_approvals_entity_is_a_fault(
    tmp_path: Path, sink: dict[str, str], approvals: dict[str, str]
) -> None:
    path = write(tmp_path, {"sinks": {"all": {"kind": "servicebus", **sink}}, "approvals": approvals})
    fault = r"sinks\.all\.(queue|topic): .*the entity that \[approvals\] receives from"
    with pytest.raises(ConfigError, match=fault):
        load(path, {})


def test_a_sink_with_another_entity_is_accepted(tmp_path: Path) -> None:
    namespace = {"namespace": "a.servicebus.windows.net"}
    sinks = {"one": {"kind": "servicebus", **namespace, "topic": "events"}}
    sinks["two"] = {"kind": "servicebus", "namespace": "b.servicebus.windows.net", "queue": "approvals"}
    path = write(tmp_path, {"sinks": sinks, "approvals": {**namespace, "queue": "approvals"}})
    assert set(load(path, {}).sinks) == {"one", "two"}
