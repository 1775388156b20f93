"""Every kind of sink and every webhook format: one line each.

They are named, not imported: sinks and formats are layers above the settings, and a process loads only what its
configuration has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from bridge.config.names import nearest
from bridge.config.validators import quote


@dataclass(frozen=True, slots=True)
class SinkKind:
    """A kind of sink: where its settings and its class are."""

    settings: str
    sink: str


SINK_KINDS: dict[str, SinkKind] = {
    "eventgrid": SinkKind(
        "bridge.config.eventgrid:EventGridSettings", "bridge.sinks.eventgrid:EventGridSink"
    ),
    "exec": SinkKind("bridge.config.exec:ExecSettings", "bridge.sinks.exec:ExecSink"),
    "servicebus": SinkKind(
        "bridge.config.servicebus:ServiceBusSettings", "bridge.sinks.servicebus:ServiceBusSink"
    ),
    "stdout": SinkKind("bridge.config.sinks:StdoutSettings", "bridge.sinks.stdout:StdoutSink"),
    "webhook": SinkKind("bridge.config.webhook:WebhookSettings", "bridge.sinks.webhook:WebhookSink"),
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


class UnknownNameError(ValueError):
    """A setting names something that is not registered; the text says what is."""

    def __init__(self, key: str, given: object, known: Iterable[str]) -> None:
        """Describe the error.

        Args:
            key: the setting's key.
            given: its value.
            known: every registered name.
        """
        self.key = key
        expected = ", ".join(sorted(known))
        super().__init__(f"given {quote(given)}, expected one of {expected}{nearest(given, known)}")


def sink_settings(kind: object) -> Any:
    """Import the settings of a kind of sink.

    Raises:
        UnknownNameError: the kind is unknown.
    """
    if not isinstance(kind, str) or kind not in SINK_KINDS:
        raise UnknownNameError("kind", kind, SINK_KINDS)
    return resolve_name(SINK_KINDS[kind].settings)


def sink_class(kind: str) -> Any:
    """Import the class of a kind of sink."""
    return resolve_name(SINK_KINDS[kind].sink)


def format_class(name: object) -> Any:
    """Import the class of a webhook format.

    Raises:
        UnknownNameError: the format is unknown.
    """
    if not isinstance(name, str) or name not in FORMATS:
        raise UnknownNameError("format", name, FORMATS)
    return resolve_name(FORMATS[name])
