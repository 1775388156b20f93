"""An open page of the console, as a browser without a window: it follows the stream and fetches the page again."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress

import requests

ANSWER_SECONDS = 30.0


class OpenPage:
    """Notes when the console first shows each EventId of a group, after a fetch of its page *Now*."""

    def __init__(self, url: str, group: str) -> None:
        self._url, self._group = url, group
        self._seen: dict[str, float] = {}
        self._is_closed = False
        self.fetch_seconds: list[float] = []
        self._thread = threading.Thread(target=self._run, name="page", daemon=True)
        self._thread.start()

    @property
    def seen(self) -> Mapping[str, float]:
        """Return when each EventId was on the page, in seconds since 1970."""
        return self._seen.copy()

    def close(self) -> None:
        """Close the page, at the next message of its stream or at the end of the console."""
        self._is_closed = True
        self._thread.join(2 * ANSWER_SECONDS)

    def _run(self) -> None:
        while not self._is_closed:
            with suppress(requests.RequestException), requests.Session() as session:
                self._follow(session)

    def _follow(self, session: requests.Session) -> None:
        shown = b""
        with session.get(f"{self._url}/live", stream=True, timeout=ANSWER_SECONDS) as stream:
            for line in stream.iter_lines(chunk_size=1):
                if self._is_closed:
                    return
                if line.startswith(b"data") and line != shown:  # a version that the page does not show
                    self._fetch(session)
                    shown = line

    def _fetch(self, session: requests.Session) -> None:
        began = time.time()
        session.get(self._url, params={"group": self._group}, timeout=ANSWER_SECONDS)
        now = time.time()
        self.fetch_seconds.append(now - began)
        # The page gathers the events of a wave in one line; the API names each.
        address = f"{self._url}/api/v1/events"
        found = session.get(address, params={"group": self._group}, timeout=ANSWER_SECONDS).json()
        for event in found["events"]:
            self._seen.setdefault(event["event_id"].upper(), now)
