"""Write events for PagerDuty (Events API v2): one alert for each EventId, and others for what fails."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from hashlib import sha256
from typing import Annotated, ClassVar, Literal

from pydantic import field_validator

from bridge.config.base import Secret
from bridge.config.sinks import ChatSettings, Pattern, Rate, WebhookSettings
from bridge.contract.types import is_new_type, type_of
from bridge.events.filters import Filter
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

# What is done with which alert: that of the Scheduled Event (""), of an approval or a drain that failed, or one of
# the VM itself. With the action "", nothing is sent; neither for a type without a row, which a later version may add.
ACTIONS: Mapping[str, tuple[Action, str]] = {
    "scheduledevent.scheduled": ("trigger", ""),
    "scheduledevent.started": ("acknowledge", ""),
    "scheduledevent.updated": ("trigger", ""),
    "scheduledevent.advised": ("", ""),
    "scheduledevent.completed": ("resolve", ""),
    "scheduledevent.canceled": ("resolve", ""),
    "scheduledevent.ended": ("resolve", ""),
    "approval.accepted": ("acknowledge", ""),
    "approval.rejected": ("trigger", "approval"),
    "approval.failed": ("trigger", "approval"),
    "approval.prepared": ("resolve", "drain"),
    "approval.outofwork": ("trigger", "out-of-work"),
    "approval.recovered": ("resolve", "out-of-work"),
    "imds.unreachable": ("trigger", "watch"),
    "imds.recovered": ("resolve", "watch"),
    "bridge.loss": ("trigger", "loss"),
    "bridge.test": ("trigger", "test"),
}
_FAILURES = ("rejected", "failed")
_SEVERITIES = {
    "freeze": "info",
    "reboot": "warning",
    "redeploy": "error",
    "preempt": "critical",
    "terminate": "error",
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

    @field_validator("types")
    @classmethod
    def _check_actions(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            named = Filter(types=[pattern])
            if not any(named.matches_type(type_of(name)) for name in ACTIONS):
                raise ValueError(f"PagerDuty has no action for {pattern}; leave it out")
        return patterns


class PagerDuty(ChatFormat):
    """Alerts that a notice triggers, a start or an approval acknowledges, and an end resolves."""

    settings: ClassVar = PagerDutySettings

    def __init__(self, settings: PagerDutySettings) -> None:
        super().__init__(settings)
        self._routing_key = check_routing_key(settings.routing_key.read())
        register_secret(self._routing_key)
        taken = Filter(types=settings.types)
        self._takes_failures = any(taken.matches_type(type_of(f"approval.{one}")) for one in _FAILURES)

    def write(self, event: Mapping[str, Json], now: datetime) -> Json:
        """Return the request; None for an event that is no alarm."""
        view = EventView(event, now=now)
        message = self._notice(event, now)
        action, alert = _action(view)
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


def _action(view: EventView) -> tuple[Action, str]:
    """Return what is done with which alert."""
    action, alert = ACTIONS.get(view.kind, ("", ""))
    was_advised = view.get("PreviousStatus").lower() == ADVISORY
    if view.data.get("DryRun") is True or (was_advised and action == "resolve"):
        action = ""  # an early warning has opened no alert
    # PagerDuty drops an acknowledgement without an alert: a host that failed without a notice would not be reported.
    elif view.kind == "scheduledevent.started" and is_alarm(view.event):
        action = "trigger"
    elif view.kind == "scheduledevent.updated" and view.status != SCHEDULED:
        action = "acknowledge" if view.status == STARTED else ""
    return action, "drain" if view.get("Reason") == "not_prepared" else alert


def _dedup_key(view: EventView, alert: str) -> str:
    """Return the alert's key: by the EventId in lower case, so that all VMs of a group share one, or by the VM."""
    ids = (view.data.get("EventId"), view.event.get("subject"), view.event.get("id"))
    event_id = next((one for one in ids if one and isinstance(one, str)), "unknown").lower()
    # Unlike the epoch these last over restarts, and the state keeps them while IMDS is unreachable. The name alone
    # may be that of VMs in several resource groups.
    reporter = f"{view.of_vm('ResourceId').lower()}:{view.event.get('reporter') or view.vm}".lstrip(":")
    of_event = {"": event_id, "approval": f"imds-bridge:approval:{event_id}"}
    of_vm = f"imds-bridge:{alert}:{reporter}" + f":{event_id}" * (alert == "drain")
    key = of_event.get(alert, of_vm)
    return key if _DEDUP_KEY.fullmatch(key) else sha256(key.encode("utf-8", "replace")).hexdigest()


def _payload(message: Notice, view: EventView, alert: str) -> Json:
    of_type = _SEVERITIES.get(view.event_type.lower(), "info" if is_new_type(view.event_type) else "warning")
    severity = "info" if alert == "test" else "error" if alert else of_type
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
