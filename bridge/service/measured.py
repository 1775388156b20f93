"""What is counted of IMDS and of the outbox. Without metrics, nothing is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bridge.errors import ImdsError
from bridge.imds.client import ImdsClient
from bridge.outbox.outbox import Outbox

if TYPE_CHECKING:  # few processes load what counts
    from bridge.service.metrics import Meter


class NoMeter:
    """The meter of a process without metrics: it counts nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


NO_METER = NoMeter()


class MeasuredImds(ImdsClient):
    """IMDS; its requests for the document are counted."""

    meter: Meter | NoMeter = NO_METER

    def document(self, **limits: Any) -> bytes:
        """Return the document, and count the request."""
        began_at, failure = self._clock.monotonic(), None
        try:
            return super().document(**limits)
        except ImdsError as error:
            failure = error
            raise
        finally:
            self.meter.polled(failure, self._clock.monotonic() - began_at)


class MeasuredOutbox(Outbox):
    """The outbox; its new events are counted."""

    meter: Meter | NoMeter = NO_METER

    def commit(self, events: Any, **more: Any) -> bool:
        """Store events, and count them."""
        stored = super().commit(events, **more)
        self.meter.committed([event for event, _ in events])
        return stored
