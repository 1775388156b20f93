"""kill -9 of `imds-bridge relay` at any instant: no event is lost, and few come twice."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from pathlib import Path

import pytest

from tests.support.bus import Sender
from tests.support.inbox import Inbox
from tests.support.process import LIMIT_SECONDS, wait_until
from tests.support.relay import TOPIC, RelayProcess, body_of, event_message, fleet_bus, subscription
from tests.support.servicebus import ServiceBusLab

pytestmark = pytest.mark.usefixtures("without_coverage")

KILLS = 30
SENT_AT_ONCE = 8


def seed() -> int:
    """Choose the seed and print it: pytest shows it when the test fails."""
    chosen = int(os.environ.get("TEST_KILL_SEED", random.SystemRandom().randrange(2**32)))
    print(f"TEST_KILL_SEED={chosen} chooses the same instants again")
    return chosen


class Traffic:
    """A fleet that publishes all the time; `sent` names what the topic has."""

    def __init__(self, bus: ServiceBusLab, rng: random.Random) -> None:
        self.sent: list[str] = []
        self._rng = rng
        self._bus = bus
        self._stop_when_drained = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Send nothing more."""
        self._stop_when_drained.set()
        self._thread.join(LIMIT_SECONDS)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with Sender(self._bus, TOPIC) as sender:
            while not self._stop_when_drained.wait(self._rng.uniform(0, 0.06)):
                count = self._rng.randint(1, SENT_AT_ONCE)
                names = [f"e{len(self.sent) + number:06}" for number in range(count)]
                sender.send(*map(event_message, names))
                self.sent += names


@pytest.mark.timeout(600)  # 30 processes, each started and killed
def test_kill_9_at_random_instants_of_continuous_traffic_loses_nothing(tmp_path: Path) -> None:
    rng = random.Random(seed())  # noqa: S311 - it shall be repeatable
    with Inbox(strict=True) as inbox, ServiceBusLab(fleet_bus()) as bus:
        relay = RelayProcess(tmp_path, bus, inbox)
        traffic = Traffic(bus, random.Random(rng.random()))  # noqa: S311
        for _ in range(KILLS):
            run_and_kill(relay, bus, inbox, rng)
        traffic.finish()
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
    assert traffic.sent
    assert set(arrived) == {body_of(name) for name in traffic.sent}
    assert (counts.completed, counts.dead_letters) == (len(traffic.sent), 0)
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
            more = rng.randint(1, 60)
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
