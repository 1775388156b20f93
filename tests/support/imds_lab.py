"""The lab's IMDS, on which tests can wait, and which serves any document."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from bridge.lab import imds
from bridge.lab.httpd import JSON_TYPE, Answer, HttpRequest, json_answer
from tests.support.http_faults import Fault
from tests.support.process import LIMIT_SECONDS, wait_until

T = TypeVar("T")


class ImdsLab(imds.ImdsLab):
    """The lab's IMDS, for tests."""

    fault_class = Fault
    _served: dict[str, Any] | bytes | None = None

    def serve_document(self, document: dict[str, Any] | bytes | None) -> None:
        """Serve exactly this document; None serves the events again."""
        with self._changed:
            self._served = document

    def _document(self, request: HttpRequest) -> Answer:
        if isinstance(self._served, bytes):
            return Answer(body=self._served, headers={"content-type": JSON_TYPE})
        return super()._document(request) if self._served is None else json_answer(self._served)

    def _own(self, event_ids: list[str]) -> list[str]:
        events = self._served.get("Events", ()) if isinstance(self._served, dict) else ()
        served = {str(event.get("EventId")).casefold() for event in events}
        return [one for one in event_ids if one.casefold() not in served]

    def wait_for(self, predicate: Callable[[], T], timeout: float = LIMIT_SECONDS) -> T:
        """Wait until the predicate holds; raise AssertionError with the state after `timeout` real seconds."""
        return wait_until(predicate, timeout_seconds=timeout, describe=lambda: json.dumps(self.state()))
