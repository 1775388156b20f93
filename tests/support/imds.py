"""IMDS as the tests of its users need it: events that a test schedules and ends, and answers that take time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bridge.imds.instance import Vm
from bridge.imds.memory import ImdsDouble
from tests.support.clock import MovedClock
from tests.support.diff import FIRST, entry

WEB_0 = Vm(
    name="web-0",
    vm_id="13f56399-bd52-4150-9748-7190aae1ff21",
    resource_id="/subscriptions/8d10da13/resourceGroups/shop/providers/Microsoft.Compute/virtualMachines/web-0",
    subscription_id="8d10da13",
    resource_group="shop",
)
WEB_1 = Vm(
    name="web-1",
    vm_id="22222222-bd52-4150-9748-7190aae1ff21",
    resource_id="/subscriptions/8d10da13/resourceGroups/shop/providers/Microsoft.Compute/virtualMachines/web-1",
    subscription_id="8d10da13",
    resource_group="shop",
)


class ScriptedImds(ImdsDouble):
    """A double whose events a test schedules, starts and ends.

    `asked` has the monotonic times of all requests for the document, `lags` the seconds that the next answers take on
    the clock.
    """

    def __init__(self, clock: MovedClock, *, vm: Vm = WEB_0) -> None:
        super().__init__(vm=vm)
        self.clock = clock
        self.asked: list[float] = []
        self.lags: list[float] = []
        self.incarnation = 1
        self._events: dict[str, dict[str, Any]] = {}

    def schedule(self, event_id: str = FIRST, **fields: Any) -> None:
        """Announce an event."""
        self._events[event_id] = entry(event_id, **fields)
        self._publish()

    def start(self, event_id: str = FIRST) -> None:
        """Start an event."""
        self.update(event_id, EventStatus="Started", NotBefore="")

    def update(self, event_id: str = FIRST, **fields: Any) -> None:
        """Change an event."""
        self._events[event_id].update(fields)
        self._publish()

    def end(self, *event_ids: str) -> None:
        """Remove events from the document: those that have started are completed, the others canceled."""
        for event_id in event_ids or [FIRST]:
            del self._events[event_id]
        self._publish()

    def serve_events(self) -> None:
        """Answer with the events again, after other documents."""
        self.serve({"DocumentIncarnation": self.incarnation, "Events": list(self._events.values())})

    def document(
        self, *, timeout_seconds: float | None = None, waiting: Callable[[], object] | None = None
    ) -> bytes:
        """Answer after the next lag."""
        self.asked.append(self.clock.monotonic())
        lag = self.lags.pop(0) if self.lags else 0.0
        try:
            return super().document(timeout_seconds=timeout_seconds)
        finally:
            for _ in range(int(lag)):
                self.clock.advance(1.0)
                if waiting:
                    waiting()
            self.clock.advance(lag % 1)

    def _publish(self) -> None:
        self.incarnation += 1
        self.serve_events()
