"""The lab's inbox with what tests need: tokens, another consent, and waiting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bridge.lab import inbox
from bridge.lab.httpd import Answer, HttpRequest
from bridge.lab.inbox import problem, subject_of
from tests.support.imds_lab import Fault
from tests.support.process import LIMIT_SECONDS, wait_until


class Inbox(inbox.Inbox):
    """The lab's inbox, for tests."""

    fault_class = Fault

    def __init__(
        self, *, allowed_origin: str | None = "*", allowed_rate: str = "120", **options: Any
    ) -> None:
        """Start the server.

        Args:
            allowed_origin: the origin that the handshake allows; None for no consent.
            allowed_rate: the deliveries per minute that the handshake allows, or "*".
            options: those of the lab's inbox.
        """
        self._token: str | None = None
        self._consent = (allowed_origin, allowed_rate)
        super().__init__(**options)

    def require_token(self, token: str | None) -> None:
        """Answer 401 to deliveries without this token as `Authorization: Bearer`; None to accept all."""
        self._token = token

    @property
    def problems(self) -> list[str]:
        """Return the reasons for which a strict receiver would have refused accepted deliveries."""
        found = [problem(one) for one in self.accepted]
        return [one[1] for one in found if one is not None]

    def clear(self) -> None:
        """Remove all faults and everything that was received."""
        self._faults.clear()
        with self._changed:
            self._received.clear()

    def wait_for(self, expected: int | Callable[[], object], timeout: float = LIMIT_SECONDS) -> Any:
        """Wait for this many accepted deliveries, or until the predicate holds.

        Raises: AssertionError that lists what arrived, after `timeout` seconds.
        """
        is_true = expected if callable(expected) else lambda: len(self.accepted) >= expected
        return wait_until(is_true, timeout_seconds=timeout, describe=self._what_arrived, apart_seconds=0.01)

    def _what_arrived(self) -> str:
        lines = [
            f"{one.method} {one.path} {subject_of(one)} -> {one.status or 'no answer'}"
            for one in self.received
        ]
        return f"{len(lines)} requests arrived" + "".join(f"\n  {line}" for line in lines[-50:])

    def _answer(self, request: HttpRequest) -> Answer:
        is_known = self._token is None or request.headers.get("authorization") == f"Bearer {self._token}"
        if request.method != "OPTIONS" and not is_known:
            return Answer(status=401, headers={"www-authenticate": "Bearer"})
        return super()._answer(request)

    def _handshake(self, request: HttpRequest) -> Answer:
        answer = super()._handshake(request)
        if "webhook-allowed-origin" not in answer.headers:
            return answer
        origin, rate = self._consent
        if origin is None:
            return replace(answer, headers={"allow": answer.headers["allow"]})
        headers = {**answer.headers, "webhook-allowed-origin": origin, "webhook-allowed-rate": rate}
        return replace(answer, headers=headers)
