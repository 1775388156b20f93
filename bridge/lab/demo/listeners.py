"""The listeners of the demo: a consumer behind Service Bus and Event Grid, a chat channel, an audit log."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from bridge.lab.demo.narrator import Narrator
from bridge.lab.eventgrid import EventGridLab
from bridge.lab.inbox import Inbox

if TYPE_CHECKING:
    from bridge.lab.demo.bus import DemoBus

HEARTBEAT, DOCUMENT = "bridge.heartbeat", "document.changed"
# The default types of a chat format.
CHAT_FAMILIES = ("scheduledevent", "approval")


class Listeners:
    """Knows what has arrived, and narrates it.

    Args:
        stack: closes the listeners.
        bus: the Service Bus, if there is one.
    """

    def __init__(self, stack: ExitStack, bus: DemoBus | None) -> None:
        self.audit = stack.enter_context(Inbox(strict=True))
        self.is_audit_up = True
        self._bus = bus
        self._channel = stack.enter_context(Inbox())
        self._grid = stack.enter_context(EventGridLab())
        self._narrated: set[str] = set()
        self._audited: set[str] = set()
        self._messages = 0

    def config(self) -> str:
        """Return the sinks of the configuration."""
        return f"""
[sinks.audit]
kind = "webhook"
url = "{self.audit.url}"

[sinks.grid]
kind = "eventgrid"
endpoint = "{self._grid.custom_endpoint}"
key = "{self._grid.keys[0]}"

[sinks.chat]
kind = "webhook"
format = "slack"
url = "{self._channel.url}"
time_zone = "UTC"
{self._bus.config() if self._bus else ""}"""

    def arrived(self) -> dict[str, set[str]]:
        """Return the ids of the events that have arrived, by listener."""
        places = {"Event Grid": set(self.events()), "the audit log": set(self._audit_events())}
        return {**places, "Service Bus": self._bus.received_ids()} if self._bus else places

    def events(self) -> dict[str, dict[str, Any]]:
        """Return the events that Event Grid has accepted, by id."""
        return {event["id"]: event for event in self._grid.events()}

    def chat(self) -> list[str]:
        """Return the first line of each message in the chat channel."""
        return [one.json()["text"].partition("\n")[0] for one in self._channel.accepted]

    def have_all(self) -> bool:
        """Return whether every listener that works has what Event Grid has."""
        arrived = self.arrived()
        wanted = arrived["Event Grid"]
        if not self.is_audit_up:
            del arrived["the audit log"]
        chat = [event for event in self.events().values() if name_of(event).startswith(CHAT_FAMILIES)]
        return all(ids >= wanted for ids in arrived.values()) and len(self.chat()) >= len(chat)

    def narrate(self, narrate: Narrator) -> None:
        """Print what has arrived since the last call."""
        self._narrate_consumer(narrate)
        for message in self.chat()[self._messages :]:
            narrate.line("CHAT", message)
            self._messages += 1
        self._narrate_audit(narrate)

    def _narrate_consumer(self, narrate: Narrator) -> None:
        on_bus = self._bus.received_ids() if self._bus else None
        for event_id, event in self.events().items():
            if event_id not in self._narrated and (on_bus is None or event_id in on_bus):
                self._narrated.add(event_id)
                if name_of(event) not in (DOCUMENT, HEARTBEAT):
                    narrate.line("CONSUMER", describe(event))

    def _narrate_audit(self, narrate: Narrator) -> None:
        new = {
            event_id: event
            for event_id, event in self._audit_events().items()
            if event_id not in self._audited
        }
        if new:
            narrate.line("AUDIT", ", ".join(map(name_of, new.values())))
        self._audited |= new.keys()

    def _audit_events(self) -> dict[str, dict[str, Any]]:
        return {event["id"]: event for event in self.audit.events()}


def name_of(event: Mapping[str, Any]) -> str:
    """Return the type without what all types share."""
    return str(event["type"]).removeprefix("io.imdsbridge.").removesuffix(".v1")


def describe(event: Mapping[str, Any]) -> str:
    """Describe an event in a few words."""
    name, data = name_of(event), event["data"]
    names = ", ".join(data.get("Resources") or ())
    if "Outcome" in data:
        return f"{name}: {data['Reason']}{f', releases {names}' if names else ''}"
    if "EventId" not in data:
        return f"{name}: {data['Cause']}"
    if data["EventStatus"] == "Scheduled":
        names += f" in {data['NoticeSeconds'] / 60:.0f} min"
    return f"{name}: {data['EventType']} of {names}"
