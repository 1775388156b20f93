"""The wrong answers that only tests ask of the lab's HTTP servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from bridge.lab import httpd
from bridge.lab.httpd import Answer, json_answer

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
