"""Show events in PagerDuty (Events API v2): one alert for each EventId, from its notice to its end."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from hashlib import sha256
from typing import ClassVar, Literal

from bridge.config.base import Secret
from bridge.formats.base import ChatFormat, ChatSettings
from bridge.formats.notice import Notice, notice
from bridge.formats.view import Reading
from bridge.imds.document import STARTED
from bridge.runtime.instants import iso_utc
from bridge.runtime.json import Json
from bridge.runtime.logging import register_secret

Action = Literal["trigger", "acknowledge", "resolve"]

COMPONENT_LENGTH = 255
_DEDUP_KEY = re.compile(r"[!-~]{1,255}")
_ROUTING_KEY = re.compile(r"[0-9A-Za-z]{32}")

_ACTIONS: Mapping[str, Action] = {
    "scheduledevent.scheduled": "trigger",
    "scheduledevent.started": "acknowledge",
    "scheduledevent.updated": "trigger",
    "scheduledevent.completed": "resolve",
    "scheduledevent.canceled": "resolve",
    "scheduledevent.ended": "resolve",
    "approval.accepted": "acknowledge",
    "imds.unreachable": "trigger",
    "imds.recovered": "resolve",
    "bridge.test": "trigger",
}
TYPES: tuple[str, ...] = tuple(f"io.imdsbridge.{kind}.v1" for kind in _ACTIONS)
_SEVERITIES = {
    "freeze": "info",
    "reboot": "warning",
    "redeploy": "error",
    "preempt": "critical",
    "terminate": "error",
}
# What is about the VM and no event of it: the alert's name and its severity.
_OWN_ALERTS = {
    "imds.unreachable": ("watch", "error"),
    "imds.recovered": ("watch", "error"),
    "bridge.test": ("test", "info"),
}


def check_routing_key(key: str) -> str:
    """Refuse what is no integration key of PagerDuty.

    Raises:
        ValueError: it is none.
    """
    if not _ROUTING_KEY.fullmatch(key):
        raise ValueError("expected the 32 letters and digits of PagerDuty's integration key")
    return key


class PagerDutySettings(ChatSettings):
    """Alerts for an Events v2 integration, whose key is `routing_key`."""

    format: Literal["pagerduty"]
    url: Secret = Secret("https://events.pagerduty.com/v2/enqueue")
    routing_key: Secret
    types: tuple[str, ...] = ("io.imdsbridge.scheduledevent.*",)
    max_per_second: float | None = 2.0
    secret_checks: ClassVar = {**ChatSettings.secret_checks, "routing_key": check_routing_key}


class PagerDuty(ChatFormat):
    """Alerts that a notice triggers, a start or an approval acknowledges, and an end resolves."""

    settings: ClassVar = PagerDutySettings

    def __init__(self, settings: PagerDutySettings) -> None:
        self._routing_key = check_routing_key(settings.routing_key.read())
        register_secret(self._routing_key)
        self._zone = settings.zone

    @staticmethod
    def is_setup_error(body: bytes) -> bool:
        """Recognise a routing key that is refused."""
        return b'"invalid event"' in body and re.search(rb"(?i)routing[ _]key", body) is not None

    def write(self, event: Mapping[str, Json], now: datetime) -> Json:
        """Return the request.

        Raises:
            ValueError: nothing is to be done in PagerDuty about this type of event (see TYPES).
        """
        reading = Reading(event)
        said = notice(event, now=now, zone=self._zone)
        return {
            "routing_key": self._routing_key,
            "event_action": _action(reading),
            "dedup_key": _dedup_key(event, reading),
            "client": "imds-bridge",
            "payload": _payload(said, reading),
        }


def _action(reading: Reading) -> Action:
    if reading.kind not in _ACTIONS:
        raise ValueError(
            f"PagerDuty has no action for an event of type {reading.type}; leave it out of `types`"
        )
    if reading.kind == "approval.accepted" and reading.data.get("DryRun") is True:
        raise ValueError(f"PagerDuty has no action for a dry run ({reading.type})")
    # An acknowledgement of no alert is dropped: nobody would learn of a host that failed without a notice.
    if reading.kind == "scheduledevent.started" and not reading.get("PreviousStatus"):
        return "trigger"
    if reading.kind == "scheduledevent.updated" and reading.status == STARTED:
        return "acknowledge"
    return _ACTIONS[reading.kind]


def _dedup_key(event: Mapping[str, Json], reading: Reading) -> str:
    """Name the alert: by the EventId without its letter case, so that every VM of a group means the same one."""
    if reading.kind in _OWN_ALERTS:
        # The VM may be unknown when it goes blind and known when it sees again; its epoch stays.
        who = event.get("reporterepoch") or reading.of_vm("VmId") or reading.vm
        key = f"imds-bridge:{_OWN_ALERTS[reading.kind][0]}:{who}"
    else:
        ids = (reading.data.get("EventId"), event.get("subject"), event.get("id"))
        key = next((one for one in ids if one and isinstance(one, str)), "unknown").lower()
    return key if _DEDUP_KEY.fullmatch(key) else sha256(key.encode("utf-8", "replace")).hexdigest()


def _payload(said: Notice, reading: Reading) -> Json:
    own = _OWN_ALERTS.get(reading.kind)
    severity = own[1] if own else _SEVERITIES.get(reading.event_type.lower(), "warning")
    hint = ("You can resolve this alert.",) if reading.kind == "bridge.test" else ()
    meaning = "\n".join((*said.sentences, *hint))
    details = {"Meaning": meaning} if meaning else {}
    for fact in (*said.facts, *said.details):
        details[fact.label] = f"{details[fact.label]}\n{fact.text}" if fact.label in details else fact.text
    payload = {
        "summary": said.title,
        "source": reading.vm,
        "severity": severity,
        "timestamp": iso_utc(reading.time) if reading.time else "",
        "component": reading.vms(COMPONENT_LENGTH) if reading.count else "",
        "group": reading.of_vm("ScaleSet") or reading.resource_group,
        "class": reading.event_type or reading.kind,
        "custom_details": details,
    }
    return {name: value for name, value in payload.items() if value}
