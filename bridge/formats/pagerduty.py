"""Write events for PagerDuty (Events API v2): one alert for each EventId, and others for what fails."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from hashlib import sha256
from typing import Annotated, ClassVar, Literal

from bridge.config.base import Secret
from bridge.config.sinks import ChatSettings, Pattern, Rate, WebhookSettings, expression_of
from bridge.contract.types import is_new_type, type_of
from bridge.events.model import is_alarm
from bridge.formats.base import ChatFormat
from bridge.formats.notice import EventView, Notice
from bridge.imds.document import ADVISORY, SCHEDULED, STARTED
from bridge.runtime.json import Json
from bridge.runtime.text import register_secret
from bridge.runtime.time import iso_utc

Action = Literal["trigger", "acknowledge", "resolve", ""]

COMPONENT_LENGTH = 255
_DEDUP_KEY = re.compile(r"[!-~]{1,255}")
_ROUTING_KEY = re.compile(r"[0-9A-Za-z]{32}")

# With "", nothing is sent.
ACTIONS: Mapping[str, Action] = {
    "scheduledevent.scheduled": "trigger",
    "scheduledevent.started": "acknowledge",
    "scheduledevent.updated": "trigger",
    "scheduledevent.advised": "",
    "scheduledevent.completed": "resolve",
    "scheduledevent.canceled": "resolve",
    "scheduledevent.ended": "resolve",
    "approval.accepted": "acknowledge",
    "approval.rejected": "trigger",
    "approval.failed": "trigger",
    "approval.prepared": "resolve",
    "approval.outofwork": "trigger",
    "approval.recovered": "resolve",
    "imds.unreachable": "trigger",
    "imds.recovered": "resolve",
    "bridge.loss": "trigger",
    "bridge.test": "trigger",
}
_FAILURES = ("approval.rejected", "approval.failed")
_SEVERITIES = {
    "freeze": "info",
    "reboot": "warning",
    "redeploy": "error",
    "preempt": "critical",
    "terminate": "error",
}
# Alerts about the VM itself instead of a Scheduled Event: the alert's name and its severity.
_OWN_ALERTS = {
    "imds.unreachable": ("watch", "error"),
    "imds.recovered": ("watch", "error"),
    "approval.outofwork": ("out-of-work", "error"),
    "approval.recovered": ("out-of-work", "error"),
    "bridge.loss": ("loss", "error"),
    "bridge.test": ("test", "info"),
}


def check_routing_key(key: str) -> str:
    """Check an integration key of PagerDuty.

    Raises:
        ValueError: it is not one.
    """
    if not _ROUTING_KEY.fullmatch(key):
        raise ValueError("expected the 32 letters and digits of PagerDuty's integration key")
    return key


class PagerDutySettings(ChatSettings, WebhookSettings):
    """Alerts for an Events v2 integration."""

    format: Literal["pagerduty"]
    url: Secret = Secret("https://events.pagerduty.com/v2/enqueue")
    routing_key: Annotated[Secret, check_routing_key]
    """The integration key of an Events v2 integration. Example: `"0123456789abcdef0123456789abcdef"`."""
    types: tuple[Pattern, ...] = (
        "io.imdsbridge.scheduledevent.*",
        "io.imdsbridge.approval.outofwork.v1",
        "io.imdsbridge.approval.recovered.v1",
    )
    max_per_second: Rate | None = 2.0


class PagerDuty(ChatFormat):
    """Alerts that a notice triggers, a start or an approval acknowledges, and an end resolves."""

    settings: ClassVar = PagerDutySettings

    def __init__(self, settings: PagerDutySettings) -> None:
        super().__init__(settings)
        self._routing_key = check_routing_key(settings.routing_key.read())
        register_secret(self._routing_key)
        patterns = [re.compile(expression_of(pattern)) for pattern in settings.types]
        self._takes_failures = any(one.fullmatch(type_of(kind)) for one in patterns for kind in _FAILURES)

    def write(self, event: Mapping[str, Json], now: datetime) -> Json:
        """Return the request; None for an event that is no alarm.

        Raises:
            ValueError: PagerDuty has no action for this type of event (see ACTIONS).
        """
        view = EventView(event, now=now)
        message = self._notice(event, now)
        action, alert = _action(view), _alert(view)
        if view.kind == "approval.accepted" and self._takes_failures:
            action, alert = action and "resolve", "approval"
        if not action:
            return None
        link = self._link(view.event_id)
        return {
            "routing_key": self._routing_key,
            "event_action": action,
            "dedup_key": _dedup_key(view, alert),
            "client": "imds-bridge",
            "payload": _payload(message, view, alert),
            **({"links": [{"href": link, "text": "Open in the console"}]} if link else {}),
        }


def _action(view: EventView) -> Action:
    if view.kind not in ACTIONS:
        raise ValueError(f"PagerDuty has no action for an event of type {view.type}; leave it out of `types`")
    action, was_advised = ACTIONS[view.kind], view.get("PreviousStatus").lower() == ADVISORY
    if view.data.get("DryRun") is True or (was_advised and action == "resolve"):
        return ""  # an early warning has opened no alert
    # PagerDuty drops an acknowledgement without an alert: a host that failed without a notice would not be reported.
    if view.kind == "scheduledevent.started" and is_alarm(view.event):
        return "trigger"
    if view.kind == "scheduledevent.updated" and view.status != SCHEDULED:
        return "acknowledge" if view.status == STARTED else ""
    return action


def _alert(view: EventView) -> str:
    """Name the alert of what happens to a VM, or fails; "" is that of the Scheduled Event."""
    if view.kind in _OWN_ALERTS:
        return _OWN_ALERTS[view.kind][0]
    if view.kind == "approval.prepared" or view.get("Reason") == "not_prepared":
        return "drain"
    return "approval" if view.kind in _FAILURES else ""


def _dedup_key(view: EventView, alert: str) -> str:
    """Return the alert's key: the EventId in lower case, so that all VMs of a group share one alert."""
    event, parts = view.event, [f"imds-bridge:{alert}"] if alert else []
    if alert not in ("", "approval"):
        # Unlike the epoch it lasts over restarts, and unlike the VM's id it is known while IMDS is unreachable.
        parts.append(str(event.get("reporter") or view.vm))
    if view.kind not in _OWN_ALERTS:
        ids = (view.data.get("EventId"), event.get("subject"), event.get("id"))
        parts.append(next((one for one in ids if one and isinstance(one, str)), "unknown").lower())
    key = ":".join(parts)
    return key if _DEDUP_KEY.fullmatch(key) else sha256(key.encode("utf-8", "replace")).hexdigest()


def _payload(message: Notice, view: EventView, alert: str) -> Json:
    of_type = _SEVERITIES.get(view.event_type.lower(), "info" if is_new_type(view.event_type) else "warning")
    _, severity = _OWN_ALERTS.get(view.kind, ("", "error" if alert else of_type))
    hint = ("You can resolve this alert.",) if view.kind == "bridge.test" else ()
    meaning = "\n".join((*message.sentences, *hint))
    details = {"Meaning": meaning} if meaning else {}
    for field in (*message.fields, *message.details):
        before = f"{details[field.label]}\n" if field.label in details else ""
        details[field.label] = before + field.text
    payload = {
        "summary": message.title,
        "source": view.vm,
        "severity": severity,
        "timestamp": iso_utc(view.time) if view.time else "",
        "component": view.vms(COMPONENT_LENGTH) if view.count else "",
        "group": view.of_vm("ScaleSet") or view.resource_group,
        "class": view.event_type or view.kind,
        "custom_details": details,
    }
    return {name: value for name, value in payload.items() if value}
