"""kill -9 of `listen` and `relay` at any instant: no command and no event is lost, none is answered in two ways."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.bus import QUEUE, Sender, bus_config, command, message
from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox
from tests.support.process import LIMIT_SECONDS, Forward, kills, random_instants, wait_until
from tests.support.relay import TOPIC, RelayProcess, body_of, event_message, fleet_bus, subscription
from tests.support.servicebus import ServiceBusLab

pytestmark = pytest.mark.usefixtures("without_coverage")

MIN_NOTICE_SECONDS = 3600.0
APPROVED = {"approved", "already_approved", "not_recorded"}
PREFIX = "io.imdsbridge.approval."


@pytest.mark.timeout(0 if kills(0) else 600)
@pytest.mark.parametrize(("hold", "count"), [(False, kills(5)), (True, kills(3))])
def test_kill_9_of_listen_at_random_instants_loses_no_command_and_answers_none_in_two_ways(
    tmp_path: Path, hold: bool, count: int
) -> None:
    rng = random_instants()
    with (
        ImdsLab(rate_limit=None) as imds,
        Inbox(strict=True) as inbox,
        ServiceBusLab(bus_config(LockDuration="PT5S")) as bus,
        Sender(bus) as sender,
    ):
        listen = Forward(
            tmp_path,
            {
                "imds": {"endpoint": imds.url("web-0")},
                "sinks": {"inbox": {"kind": "webhook", "url": inbox.url, "from_start": True}},
                "approvals": {
                    "connection_string": bus.connection_string,
                    "queue": QUEUE,
                    "policy": {
                        "allow": [
                            {"event_type": ["Reboot"]},
                            {"event_type": ["Redeploy"], "min_notice_seconds": MIN_NOTICE_SECONDS},
                        ],
                        "deny": [{"event_type": ["Freeze"]}],
                    },
                },
            },
            role="listen",
        )
        expected: dict[str, set[str]] = {}  # by command, the reasons that can be right
        approvable: list[str] = []
        timed: dict[str, str] = {}  # by command, the event whose notice soon falls below the minimum

        def schedule(event_type: str, notice_seconds: float = 86_400) -> str:
            return imds.schedule(
                event_type=event_type, resources=["web-0"], notice_seconds=notice_seconds, hold=hold
            )

        for number in range(count):
            allowed, denied = schedule("Reboot"), schedule("Freeze")
            approvable.append(allowed)
            names = [f"{kind}{number}" for kind in ("allowed", "denied", "malformed", "again", "timed")]
            before = len(imds.requests())
            with listen:
                timed[names[4]] = schedule("Redeploy", MIN_NOTICE_SECONDS + rng.uniform(1.0, 3.0))
                sender.send(
                    command(allowed, id=names[0]),
                    command(denied, id=names[1]),
                    message(b"nonsense", message_id=names[2]),
                    command(allowed, id=names[3]),
                    command(timed[names[4]], id=names[4]),
                )
                # Of two commands for one event, one may come again only after the other has had it started.
                # Killed after the intent, while the document changed, it is not POSTed again: its outcome is unknown.
                expected[names[0]] = expected[names[3]] = {*APPROVED, "already_started", "unknown_outcome"}
                expected[names[1]] = {"denied"}
                expected[names[4]] = {"approved", "not_recorded", "denied", "unknown_outcome"}
                if rng.random() < 0.85:  # else while it starts
                    later = before + rng.randint(1, 3)
                    wait_until(lambda at=later: len(imds.requests()) >= at, describe=lambda: listen)  # type: ignore[misc]
                threading.Event().wait(rng.uniform(0, 0.06))
                listen.kill()
        with listen:
            wait_until(
                lambda: bus.entity(QUEUE).counts.active == 0,
                timeout_seconds=LIMIT_SECONDS * 2,
                describe=lambda: listen,
            )
            listen.wait_for_status(lambda status: status["sinks"]["inbox"]["backlog"] == 0)
            assert listen.stop() == 0, listen
        receipts = [event for event in inbox.events() if event["type"].startswith(PREFIX)]
        assert bus.failures == ()
        assert inbox.problems == []
        assert_answered(receipts, expected)
        reasons = {one["causationid"]: one["data"]["Reason"] for one in receipts if "causationid" in one}
        posted = {one.event_id for one in imds.approvals}
        assert posted <= {*approvable, *timed.values()}
        for number, event in enumerate(approvable):
            answers = {reasons[f"allowed{number}"], reasons[f"again{number}"]}
            assert event in posted if answers & APPROVED else answers == {"unknown_outcome"}, answers
        outcomes = {one["causationid"]: one["data"]["Outcome"] for one in receipts if "causationid" in one}
        for name, event in timed.items():
            # killed after the intent and before the POST, it has failed although nothing was POSTed
            assert outcomes[name] != ("Rejected" if event in posted else "Accepted"), name
        counts = bus.entity(QUEUE).counts
        assert (counts.completed, counts.dead_letters) == (4 * count, count)


def assert_answered(receipts: list[dict[str, Any]], expected: dict[str, set[str]]) -> None:
    """Check that each command has one receipt, however often it was sent, and a right one."""
    by_command: dict[str, set[str]] = defaultdict(set)
    by_id: dict[str, set[str]] = defaultdict(set)
    for receipt in receipts:
        by_command[receipt.get("causationid", "")].add(json.dumps(receipt, sort_keys=True))
        by_id[receipt["id"]].add(json.dumps(receipt, sort_keys=True))
    for name, right in expected.items():
        assert len(by_command[name]) == 1, f"{name}: {by_command[name]}"
        assert json.loads(next(iter(by_command[name])))["data"]["Reason"] in right
    assert all(len(texts) == 1 for texts in by_id.values()), "one id, two receipts"
    sequences = {(receipt["reporterepoch"], receipt["reporterseq"]) for receipt in receipts}
    assert len(sequences) == len(by_id), "a number was given twice"


# --- the relay ---

KILLS = kills(5)  # of the relay
SENT_BEFORE_A_KILL = 60


@pytest.mark.timeout(0 if KILLS > 30 else 600)
def test_kill_9_of_relay_at_random_instants_loses_no_event_and_few_come_twice(tmp_path: Path) -> None:
    rng = random_instants()
    with Inbox(strict=True) as inbox, ServiceBusLab(fleet_bus()) as bus, Sender(bus, TOPIC) as sender:
        relay = RelayProcess(tmp_path, bus, inbox)
        sent: list[str] = []
        for _ in range(KILLS):
            names = [f"e{len(sent) + number:06}" for number in range(SENT_BEFORE_A_KILL)]
            sender.send(*map(event_message, names))
            sent += names
            run_and_kill(relay, bus, inbox, rng)
        with relay:
            wait_until(
                lambda: subscription(bus).counts.active == 0,
                timeout_seconds=3 * LIMIT_SECONDS,
                describe=lambda: relay,
            )
            relay.wait_until_relayed(bus)
            assert relay.stop() == 0, relay
        counts = subscription(bus).counts
        arrived = Counter(one.body for one in inbox.accepted)
        assert bus.failures == ()
    assert set(arrived) == {body_of(name) for name in sent}
    assert (counts.completed, counts.dead_letters) == (len(sent), 0)
    # The webhook takes one event at a time, and each is acknowledged before the next is sent.
    assert arrived.total() - len(arrived) <= KILLS


def run_and_kill(relay: RelayProcess, bus: ServiceBusLab, inbox: Inbox, rng: random.Random) -> None:
    """Kill a new process while it starts, or in the midst of its work; now and then the sink fails meanwhile."""
    completed, came = subscription(bus).counts.completed, len(inbox.received)
    is_failing = rng.random() < 0.3
    if is_failing:
        inbox.fault(503, count=None)
    with relay:
        if rng.random() < 0.9:
            more = rng.randint(1, SENT_BEFORE_A_KILL)
            wait_until(
                lambda: (
                    subscription(bus).counts.completed >= completed + more
                    or len(inbox.received) >= came + more
                ),
                describe=lambda: relay,
            )
        threading.Event().wait(rng.uniform(0, 0.1))
        assert relay.process is not None
        assert relay.process.poll() is None, relay
        relay.kill()
    if is_failing:
        inbox.clear_faults()
