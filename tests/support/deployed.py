"""The console as the templates in infra deploy it, against the lab's bus with the entities that they create."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus

import requests

from bridge.config.models import Config
from tests.support.bus import Sender, message
from tests.support.console import FleetVm, RunningConsole, approvable, event_id, running
from tests.support.process import LIMIT_SECONDS, wait_until
from tests.support.servicebus import ServiceBusLab

NAMESPACE = "contoso.servicebus.windows.net"
TOPIC, SUBSCRIPTION, QUEUE = "scheduled-events", "console", "approvals"
PAGE = f"/event/{event_id('approve')}"
Headers = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Deployed:
    """A console that has received a heartbeat and an event of two VMs."""

    running: RunningConsole
    bus: ServiceBusLab

    def get(self, path: str, headers: Headers | None = None) -> int:
        """Return the status that a path answers with."""
        return self.running.get(path, headers).status_code

    def approve(self, person: Headers) -> int:
        """Approve the event as a browser does; return the status."""
        page = self.running.get(PAGE, person)
        fields = dict(re.findall(r'type="hidden" name="(\w+)" value="(\w+)"', page.text))
        cookie = page.headers.get("set-cookie", "").partition(";")[0]
        response = requests.post(
            f"{self.running.url}{PAGE}/approve",
            data={**fields, "confirm": event_id("approve")[-4:], "reason": "drained"},
            headers={**person, "Origin": self.running.console.settings.public_url, "Cookie": cookie},
            timeout=LIMIT_SECONDS,
            allow_redirects=False,
        )
        return response.status_code

    def commands(self) -> list[str | None]:
        """Return the sessions of the commands that were sent."""
        return [one.session_id for one in self.bus.entity(QUEUE).messages]


@contextmanager
def bus_of_the_templates() -> Iterator[ServiceBusLab]:
    """Run a bus with the entities of infra/bicep, and two events in the topic."""
    subscription = {"Name": SUBSCRIPTION, "Properties": {}}
    topic = {"Name": TOPIC, "Properties": {}, "Subscriptions": [subscription]}
    queue = {"Name": QUEUE, "Properties": {"RequiresSession": True}}
    entities = {"Name": "lab", "Topics": [topic], "Queues": [queue]}
    with ServiceBusLab({"UserConfig": {"Namespaces": [entities]}}) as bus:
        now, vm = datetime.now(UTC), FleetVm("web-0")
        with Sender(bus, TOPIC) as sender:
            sender.send_one(message(vm.heartbeat(now), message_id="1"))
            sender.send_one(message(vm.change("scheduled", approvable(now), now), message_id="2"))
        yield bus
        assert bus.failures == ()


@contextmanager
def deployed_console(config: Config, bus: ServiceBusLab, viewer: Headers) -> Iterator[Deployed]:
    """Run the console until it shows the event to a viewer."""
    with running(config) as found:
        console = Deployed(running=found, bus=bus)
        wait_until(lambda: console.get(PAGE, viewer) == HTTPStatus.OK)
        yield console
