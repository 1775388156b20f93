"""Narrate a demonstration live: what IMDS shows, what is published and what arrives, a line each."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from bridge.errors import BridgeError
from bridge.lab.imds import ImdsLab
from bridge.lab.inbox import Inbox
from bridge.outbox.inspect import newest, show
from bridge.outbox.state_dir import StateFolder
from bridge.runtime.terminal import escape

LOOK_SECONDS = 0.1
COLUMN = 10
TEXT_WIDTH = 58  # 80 columns without time and name; an emoji takes two
INDENT = " " * 20
_COLOURS = {
    "STORY": "1",
    "IMDS": "33",
    "PUBLISHED": "36",
    "ARRIVED": "32",
    "CHAT": "34",
    "APPROVE": "35",
    "COUNTDOWN": "2",
}


class Narrator:
    """Prints what happens, with the seconds since the start, in 80 columns and on a terminal in colour."""

    def __init__(self) -> None:
        self._started_at = time.monotonic()
        self._lock = threading.Lock()
        self._has_colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def __call__(self, who: str, what: str) -> None:
        """Print that `who` did `what`, on several lines if it is long."""
        name = who.ljust(COLUMN)
        if self._has_colours:
            name = f"\033[{_COLOURS.get(who, '0')}m{name}\033[0m"
        text = textwrap.fill(escape(what), TEXT_WIDTH, break_on_hyphens=False).replace("\n", "\n" + INDENT)
        with self._lock:
            print(f"{time.monotonic() - self._started_at:5.1f} s  {name} {text}", flush=True)


class Watcher:
    """Reads IMDS, the outboxes, the inbox and the chat channel, in this order, and narrates what is new."""

    def __init__(
        self,
        lab: ImdsLab,
        states: Sequence[StateFolder],
        inbox: Inbox,
        chat: Callable[[], list[str]],
        narrate: Narrator,
    ) -> None:
        """Start with nothing seen.

        Args:
            lab: the simulated IMDS; it gets to know which documents have arrived.
            states: the state folders of the processes.
            inbox: the webhook.
            chat: returns the first line of each chat message.
            narrate: prints a line.
        """
        self._lab = lab
        self._states = states
        self._inbox = inbox
        self._chat = chat
        self._messages = 0
        self._narrate = narrate
        self._incarnation = 0
        self._countdown = ""
        self._stored = dict.fromkeys(range(len(states)), 0)
        self._arrived = 0

    def run(self, stop: threading.Event) -> None:
        """Narrate until `stop`, and what is new then."""
        stopped = False
        while not stopped:
            stopped = stop.wait(LOOK_SECONDS)
            self._look_at_imds()
            for number, state in enumerate(self._states):
                self._look_at_outbox(number, state)
            self._look_at_inbox()
            self._look_at_chat()

    def _look_at_imds(self) -> None:
        incarnation, events = self._lab.incarnation, self._lab.events
        if incarnation != self._incarnation:
            self._incarnation = incarnation
            content = "; ".join(map(_short, events)) or "no events"
            self._narrate("IMDS", f"document {incarnation}: {content}")
        countdown = ", ".join(
            f"{event['EventType']} of {'+'.join(event['Resources'])} in {seconds} s"
            for event in events
            if (seconds := _seconds_left(event)) is not None
        )
        if countdown and countdown != self._countdown:
            self._narrate("COUNTDOWN", countdown)
        self._countdown = countdown

    def _look_at_outbox(self, number: int, state: StateFolder) -> None:
        with contextlib.suppress(BridgeError):  # the outbox does not exist yet
            for row in newest(state, 100):
                if row["seq"] > self._stored[number]:
                    self._stored[number] = row["seq"]
                    self._narrate("PUBLISHED", about(show(state, row["id"])))

    def _look_at_inbox(self) -> None:
        events = self._inbox.events()
        for event in events[self._arrived :]:
            self._narrate("ARRIVED", about(event))
            if "DocumentIncarnation" in event["data"]:
                self._lab.document_seen(event["data"]["DocumentIncarnation"])
        self._arrived = len(events)

    def _look_at_chat(self) -> None:
        messages = self._chat()
        for message in messages[self._messages :]:
            self._narrate("CHAT", message)
        self._messages = len(messages)


def about(event: Mapping[str, Any]) -> str:
    """Describe a CloudEvent briefly."""
    name = event["type"].removeprefix("io.imdsbridge.").removesuffix(".v1")
    data = event["data"]
    if "Outcome" in data:
        return f"{name} ({data['Reason']}{', releases ' + '+'.join(data['Resources']) if data['Resources'] else ''})"
    if "EventId" in data:
        notice = data["NoticeSeconds"]
        when = f", {notice} s notice" if notice is not None and notice > 0 else ""
        return f"{name} ({data['EventType']} of {'+'.join(data['Resources'])} by {data['EventSource']}{when})"
    if "DocumentIncarnation" in data:
        return f"{name} (incarnation {data['DocumentIncarnation']})"
    return f"{name} ({data.get('Reason', event['subject'])} {event.get('reporter', '')})"


def _short(event: Mapping[str, Any]) -> str:
    return f"{event['EventType']} of {'+'.join(event['Resources'])} {event['EventStatus']}"


def _seconds_left(event: Mapping[str, Any]) -> int | None:
    if not event["NotBefore"]:
        return None
    left = (parsedate_to_datetime(event["NotBefore"]) - datetime.now(UTC)).total_seconds()
    return max(0, round(left))
