"""Every process on a Python in FIPS mode, which has neither MD5 nor BLAKE2."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.bus import ANY, QUEUE, SUBSCRIPTION, TOPIC, Sender, command
from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox
from tests.support.paths import ROOT
from tests.support.process import COMMAND, LIMIT_SECONDS, Forward, completed, run, toml
from tests.support.relay import event_message

if TYPE_CHECKING:
    from tests.support.servicebus import ServiceBusLab

SCHEDULED = "io.imdsbridge.scheduledevent.scheduled.v1"
ACCEPTED = "io.imdsbridge.approval.accepted.v1"


@pytest.fixture(autouse=True)
def fips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start every process with the hashes of FIPS mode alone."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests/support/fips"))


def settings(imds: ImdsLab, inbox: Inbox, **more: Any) -> dict[str, Any]:
    sinks = {"inbox": {"kind": "webhook", "url": inbox.url, "from_start": True}}
    return {"imds": {"endpoint": imds.url("web-0"), "poll_seconds": 0.2}, "sinks": sinks, **more}


def wait_for(inbox: Inbox, type_: str) -> None:
    inbox.wait_for(lambda: type_ in [event["type"] for event in inbox.events()], LIMIT_SECONDS)


@pytest.mark.parametrize(
    "code", ["blake2b(b'')", "blake2s()", "md5(b'')", "new('md5')", "new('blake2b')", "new(name='MD5')"]
)
def test_these_hashes_are_refused_in_these_tests(code: str) -> None:
    done = completed(COMMAND[0], "-c", f"import hashlib; hashlib.sha256(b''); hashlib.{code}")
    assert "ValueError: [digital envelope routines] unsupported" in done.stderr


def test_forward_delivers(imds: ImdsLab, inbox: Inbox, tmp_path: Path) -> None:
    imds.schedule(event_type="Reboot", resources=["web-0"])
    with Forward(tmp_path, settings(imds, inbox)) as forward:
        wait_for(inbox, SCHEDULED)
        assert forward.stop() == 0, forward


def test_listen_approves_and_delivers_the_receipt(
    imds: ImdsLab, bus: ServiceBusLab, inbox: Inbox, tmp_path: Path
) -> None:
    event_id = imds.schedule(event_type="Reboot", resources=["web-0"])
    approvals = {"connection_string": bus.connection_string, "queue": QUEUE, "policy": ANY}
    with (
        Sender(bus) as sender,
        Forward(tmp_path, settings(imds, inbox, approvals=approvals), role="listen") as listen,
    ):
        sender.send(command(event_id))
        wait_for(inbox, ACCEPTED)
        assert listen.stop() == 0, listen


def test_relay_delivers(imds: ImdsLab, bus: ServiceBusLab, inbox: Inbox, tmp_path: Path) -> None:
    source = {"connection_string": bus.connection_string, "topic": TOPIC, "subscription": SUBSCRIPTION}
    with (
        Sender(bus, TOPIC) as sender,
        Forward(tmp_path, settings(imds, inbox, relay=source), role="relay") as relay,
    ):
        sender.send(event_message("from a VM", type=SCHEDULED))
        wait_for(inbox, SCHEDULED)
        assert relay.stop() == 0, relay


def test_check_finds_nothing_wrong(imds: ImdsLab, inbox: Inbox, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(toml(settings(imds, inbox, state_dir=tmp_path / "state")))
    done = run("check", "--config", config)
    assert done.returncode == 0, done.stdout
