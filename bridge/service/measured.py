"""IMDS and the outbox, measured: what crosses these borders is counted, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from bridge.contract.types import TYPE_PREFIX
from bridge.errors import ImdsError
from bridge.events.model import CloudEvent
from bridge.imds.instance import Vm
from bridge.imds.port import Imds
from bridge.outbox.outbox import Outbox
from bridge.outbox.state_dir import StateFolder
from bridge.runtime.json import Json
from bridge.runtime.time import Clock

if TYPE_CHECKING:  # few processes load what counts
    from bridge.service.metrics import Meter


class NoMeter:
    """The meter of a process without metrics: it counts nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


NO_METER = NoMeter()


class MeasuredImds:
    """An Imds whose requests for the document are counted."""

    def __init__(self, imds: Imds, meter: Meter | NoMeter, clock: Clock) -> None:
        """Wrap an Imds.

        Args:
            imds: what is called.
            meter: what counts.
            clock: for durations.
        """
        self._imds = imds
        self._meter = meter
        self._clock = clock

    @property
    def base(self) -> str:
        """The address in use."""
        return self._imds.base

    def document(
        self, *, timeout_seconds: float | None = None, waiting: Callable[[], object] | None = None
    ) -> bytes:
        """Return the document, and count the request."""
        began_at, result = self._clock.monotonic(), "answered"
        try:
            return self._imds.document(timeout_seconds=timeout_seconds, waiting=waiting)
        except ImdsError as error:
            result = "unanswered" if error.status is None else "refused"
            result = "throttled" if error.status == HTTPStatus.TOO_MANY_REQUESTS else result
            raise
        finally:
            self._meter.polled(result, self._clock.monotonic() - began_at)

    def instance(self) -> Vm:
        """Return who this VM is."""
        return self._imds.instance()

    def approve(self, event_ids: Sequence[str], *, incarnation: Json) -> None:
        """Approve events."""
        self._imds.approve(event_ids, incarnation=incarnation)

    def close(self) -> None:
        """Close the connection."""
        self._imds.close()


class MeasuredOutbox(Outbox):
    """An outbox whose new events are counted."""

    def __init__(self, folder: StateFolder, *, meter: Meter | NoMeter, **settings: Any) -> None:
        """Open the outbox.

        Args:
            folder: where it is kept.
            meter: what counts.
            settings: as of `Outbox`.
        """
        super().__init__(folder, **settings)
        self._meter = meter

    def commit(self, events: Sequence[tuple[Any, bytes]], **kwargs: Any) -> bool:
        """Store events, and count them."""
        stored = super().commit(events, **kwargs)
        for event, _ in events:
            if isinstance(event, CloudEvent):
                _count(self._meter, event.type.removeprefix(TYPE_PREFIX), event.data)
        return stored


def _count(meter: Meter | NoMeter, event_type: str, data: Mapping[str, Any]) -> None:
    family, _, kind = event_type.removesuffix(".v1").partition(".")
    if family == "scheduledevent":
        meter.changed(kind)
        if kind == "scheduled" and data.get("NoticeSeconds") is not None:
            meter.noticed(data.get("EventType"), data["NoticeSeconds"])
    elif family == "approval":
        meter.decided(kind, data["Reason"])
    elif event_type == "bridge.loss.v1":
        meter.lost(data["Reason"], data["Count"] or 0)
