"""Every kind of sink and every webhook format, one line each.

They are named, not imported: sinks and formats are layers above the settings, and a process loads only what its
configuration has.
"""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any, TypeVar

from bridge.config.base import Faults
from bridge.config.sinks import SinkSettings
from bridge.config.values import nearest, quote

T = TypeVar("T")


# Where the settings and the class of each kind of sink are, in the order of the page.
SINK_KINDS: dict[str, tuple[str, str]] = {
    "stdout": ("bridge.sinks.stdout:StdoutSettings", "bridge.sinks.stdout:StdoutSink"),
    "webhook": ("bridge.config.sinks:WebhookSettings", "bridge.sinks.webhook:WebhookSink"),
    "eventgrid": ("bridge.config.bus:EventGridSettings", "bridge.sinks.eventgrid:EventGridSink"),
    "exec": ("bridge.sinks.exec:ExecSettings", "bridge.sinks.exec:ExecSink"),
    "servicebus": ("bridge.config.bus:ServiceBusSettings", "bridge.sinks.servicebus:ServiceBusSink"),
    "apprise": ("bridge.sinks.apprise:AppriseSettings", "bridge.sinks.apprise:AppriseSink"),
}

# Where each format's class is, which names its settings.
FORMATS: dict[str, str] = {
    "cloudevents": "bridge.formats.cloudevents:CloudEvents",
    "pagerduty": "bridge.formats.pagerduty:PagerDuty",
    "slack": "bridge.formats.slack:Slack",
    "teams": "bridge.formats.teams:Teams",
    "template": "bridge.formats.template:Template",
}
DEFAULT_FORMAT = "cloudevents"


def sink_settings(table: Any) -> Any:
    """Import the settings that a sink's table is read with.

    Raises:
        Faults: its kind or its format is unknown.
    """
    if not isinstance(table, dict):
        return SinkSettings
    settings = resolve_name(_registered("kind", table.get("kind"), SINK_KINDS)[0])
    return format_class(table.get("format", DEFAULT_FORMAT)).settings if settings.has_formats else settings


def sink_class(kind: str) -> Any:
    """Import the class of a kind of sink."""
    return resolve_name(SINK_KINDS[kind][1])


def format_class(name: object) -> Any:
    """Import the class of a webhook format.

    Raises:
        Faults: the format is unknown.
    """
    return resolve_name(_registered("format", name, FORMATS))


def _registered(key: str, name: object, known: Mapping[str, T]) -> T:
    if isinstance(name, str) and name in known:
        return known[name]
    expected = ", ".join(sorted(known))
    if name == "discord":
        expected += '; Discord takes "slack" at the URL of its webhook with /slack at the end'
    raise Faults([(key, f"given {quote(name)}, expected one of {expected}{nearest(name, known)}")])


SINK = "sinks.NAME"
# The sections that are loaded only if they are written; each may receive from a bus.
SECTIONS = {
    "approvals": "bridge.config.approvals:ApprovalSettings",
    "relay": "bridge.config.bus:RelaySettings",
    "console": "bridge.config.console:ConsoleSettings",
    "in_service": "bridge.config.in_service:InServiceSettings",
}
