"""kill -9 of `imds-bridge relay` at any instant: no event is lost, and few come twice."""

from __future__ import annotations

import random
import threading
from collections import Counter
from pathlib import Path

import pytest

from tests.support.bus import Sender
from tests.support.inbox import Inbox
from tests.support.process import LIMIT_SECONDS, kills, random_instants, wait_until
from tests.support.relay import TOPIC, RelayProcess, body_of, event_message, fleet_bus, subscription
from tests.support.servicebus import ServiceBusLab

pytestmark = pytest.mark.usefixtures("without_coverage")

KILLS = kills(10)
SENT_BEFORE_A_KILL = 60


@pytest.mark.timeout(0 if KILLS > 30 else 600)
def test_kill_9_at_random_instants_loses_no_event_and_few_come_twice(tmp_path: Path) -> None:
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
