"""HTTP connections that cannot be held open by requests that never arrive."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0


class LimitedProtocol(H11Protocol):
    """A connection that is closed if the headers of a request have not arrived in time."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Wait for the first request."""
        super().connection_made(transport)
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request; the next one has its own deadline."""
        super().data_received(data)
        if self._is_answering():
            self._forget_deadline()
        elif self._deadline is None:
            self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadline."""
        self._forget_deadline()
        super().connection_lost(exc)

    def _expect_request(self) -> None:
        self._deadline = asyncio.get_running_loop().call_later(HEADER_SECONDS, self._give_up)

    def _forget_deadline(self) -> None:
        if self._deadline:
            self._deadline.cancel()
            self._deadline = None

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _give_up(self) -> None:
        self._deadline = None
        if not self._is_answering():
            self.transport.close()
