"""The lab's IMDS for tests: waiting, any document, and the wrong answers that only tests ask for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from bridge.lab import httpd, imds
from bridge.lab.httpd import JSON_TYPE, Answer, HttpRequest, json_answer
from tests.support.process import LIMIT_SECONDS, wait_until

T = TypeVar("T")
HUGE_BODY_BYTES = 5 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Fault(httpd.Fault):
    """A wrong answer, with the kinds that tests need."""

    kinds = (*httpd.Fault.kinds, "lost_answer", "empty", "junk_prefix", "huge")

    def answer(self, right: Callable[[], Answer]) -> Answer:
        """Return the wrong answer."""
        match self.kind:
            case "lost_answer":
                return replace(right(), drop=True)
            case "empty":
                return Answer()
            case "junk_prefix":
                answer = right()
                return replace(answer, body=b"\x00junk " + answer.body)
            case "huge":
                return json_answer({"DocumentIncarnation": 1, "Filler": "x" * HUGE_BODY_BYTES, "Events": []})
            case _:
                return super().answer(right)


class ImdsLab(imds.ImdsLab):
    """The lab's IMDS, for tests."""

    fault_class = Fault
    _served: dict[str, Any] | bytes | None = None

    def serve_document(self, document: dict[str, Any] | bytes | None) -> None:
        """Serve exactly this document; None serves the events again."""
        with self._changed:
            self._served = document

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let nobody see a document between the changes that are made meanwhile."""
        with self._changed:
            yield

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
