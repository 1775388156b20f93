"""The Grafana dashboard, as code: `python -m tests.support.dashboard` writes infra/monitoring/dashboard.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.support.monitoring import FOLDER

DASHBOARD = FOLDER / "dashboard.json"

# The columns of Grafana's grid.
_COLUMNS = 24
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
# Of the processes that are chosen at the top of the dashboard.
_ON = 'instance=~"$instance"'


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel: a graph, or a `stat` with the latest values."""

    title: str
    text: str
    expr: str
    legend: str
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    height: int = 7
    # A stat turns red below or above a value.
    red_above: float | None = None
    red_below: float | None = None


def _stat(title: str, text: str, expr: str, **more: Any) -> Panel:
    return Panel(title=title, text=text, expr=expr, kind="stat", width=4, height=4, legend="", **more)


def _quantile(quantile: float, metric: str, *labels: str) -> str:
    by = ", ".join(("le", *labels))
    return (
        f"histogram_quantile({quantile}, "
        f"sum by ({by}) (rate(imds_bridge_{metric}_bucket{{{_ON}}}[$__rate_interval])))"
    )


def _per_interval(metric: str, *labels: str) -> str:
    by = ", ".join(labels)
    return f"sum by ({by}) (increase(imds_bridge_{metric}{{{_ON}}}[$__rate_interval]))"


ROWS: dict[str, tuple[Panel, ...]] = {
    "Now": (
        _stat(
            "Processes that answer",
            "Of those that Prometheus scrapes; ImdsBridgeSilent reports the others.",
            f'sum(up{{job=~"imds-bridge.*", {_ON}}})',
            red_below=1,
        ),
        _stat(
            "Scheduled events",
            "In the documents of all VMs: an event of a group counts once for each VM that sees it.",
            f"sum(imds_bridge_scheduled_events{{{_ON}}})",
        ),
        _stat(
            "Oldest answer of IMDS",
            "A notice would not be seen by a VM whose IMDS does not answer.",
            f"max(imds_bridge_imds_last_good_answer_age_seconds{{{_ON}}})",
            unit="s",
            red_above=60,
        ),
        _stat(
            "Oldest waiting event",
            "How long the oldest undelivered event has waited, over all sinks.",
            f"max(imds_bridge_oldest_waiting_seconds{{{_ON}}})",
            unit="s",
            red_above=300,
        ),
        _stat(
            "Dead letters",
            "Events that a receiver refused for good, or that became too old.",
            f"sum(imds_bridge_dead_letters{{{_ON}}})",
            red_above=1,
        ),
        _stat(
            "State writable",
            "0: a process keeps its events in memory only.",
            f"min(imds_bridge_storage_available{{{_ON}}})",
            red_below=1,
        ),
    ),
    "Scheduled Events": (
        Panel(
            title="Events in the document",
            text="By type and status.",
            expr=f"sum by (type, status) (imds_bridge_scheduled_events{{{_ON}}}) > 0",
            legend="{{type}} {{status}}",
        ),
        Panel(
            title="Changes",
            text="New, started and ended events.",
            expr=_per_interval("changes_total", "kind"),
            legend="{{kind}}",
        ),
        Panel(
            title="Shortest notice in ten",
            text="The time from the first sight to NotBefore that one event in ten does not reach.",
            expr=_quantile(0.1, "notice_seconds", "type"),
            legend="{{type}}",
            unit="s",
        ),
    ),
    "IMDS": (
        Panel(
            title="Requests",
            text="By result; each second one is normal.",
            expr=f"sum by (result) (rate(imds_bridge_polls_total{{{_ON}}}[$__rate_interval]))",
            legend="{{result}}",
            width=6,
            unit="reqps",
        ),
        Panel(
            title="Duration of a request",
            text="The 95th percentile.",
            expr=_quantile(0.95, "poll_duration_seconds", "instance"),
            legend="{{instance}}",
            width=6,
            unit="s",
        ),
        Panel(
            title="Age of the last valid answer",
            text="Above 60 s ImdsBridgeImdsUnreachable fires.",
            expr=f"imds_bridge_imds_last_good_answer_age_seconds{{{_ON}}}",
            legend="{{instance}}",
            width=6,
            unit="s",
        ),
        Panel(
            title="DocumentIncarnation",
            text="It grows with each change; a lower value is a reset.",
            expr=f"imds_bridge_document_incarnation{{{_ON}}}",
            legend="{{instance}}",
            width=6,
        ),
    ),
    "Sinks": (
        Panel(
            title="Deliveries",
            text="By sink and result; failed ones are tried again.",
            expr=_per_interval("deliveries_total", "sink", "result") + " > 0",
            legend="{{sink}} {{result}}",
        ),
        Panel(
            title="From change to delivery",
            text="The 95th percentile.",
            expr=_quantile(0.95, "delivery_seconds", "sink"),
            legend="{{sink}}",
            unit="s",
        ),
        Panel(
            title="Backlog",
            text="Events that wait for a sink, also for one that is not configured any more.",
            expr=f"sum by (sink) (imds_bridge_backlog_events{{{_ON}}})"
            f" or sum by (sink) (imds_bridge_unconfigured_backlog_events{{{_ON}}})",
            legend="{{sink}}",
        ),
        Panel(
            title="Oldest waiting event by sink",
            text="Above 300 s ImdsBridgeBacklog fires.",
            expr=f"max by (sink) (imds_bridge_oldest_waiting_seconds{{{_ON}}})",
            legend="{{sink}}",
            unit="s",
        ),
        Panel(
            title="Until the next try",
            text="0 if none is due.",
            expr=f"max by (sink) (imds_bridge_next_retry_seconds{{{_ON}}})",
            legend="{{sink}}",
            unit="s",
        ),
        Panel(
            title="Sinks that accept events",
            text="0: the last delivery failed.",
            expr=f"min by (instance, sink) (imds_bridge_sink_up{{{_ON}}})",
            legend="{{instance}} {{sink}}",
        ),
    ),
    "Approvals": (
        Panel(
            title="Results of commands",
            text="One for each EventId.",
            expr=_per_interval("commands_total", "outcome", "reason") + " > 0",
            legend="{{outcome}} {{reason}}",
            width=6,
        ),
        Panel(
            title="From command to IMDS's answer",
            text="The 95th percentile.",
            expr=_quantile(0.95, "approval_seconds"),
            legend="listen",
            width=6,
            unit="s",
        ),
        Panel(
            title="Waiting commands",
            text="Without a decision yet.",
            expr=f"imds_bridge_waiting_commands{{{_ON}}}",
            legend="{{instance}}",
            width=6,
        ),
        Panel(
            title="Connection to the bus",
            text="1 while messages can be received.",
            expr=f"imds_bridge_bus_connected{{{_ON}}}",
            legend="{{instance}}",
            width=6,
        ),
    ),
    "Process": (
        Panel(
            title="Losses",
            text="Lost events, by reason; see the runbook.",
            expr=f"sum by (reason) (imds_bridge_lost_events_total{{{_ON}}})",
            legend="{{reason}}",
            width=6,
        ),
        Panel(
            title="Size of the outbox",
            text="Events and records.",
            expr=f"imds_bridge_outbox_bytes{{{_ON}}}",
            legend="{{instance}}",
            unit="bytes",
            width=6,
        ),
        Panel(
            title="Storage errors",
            text="Failed attempts to use the state store, about one a second while it fails.",
            expr=_per_interval("storage_errors_total", "instance"),
            legend="{{instance}}",
            width=6,
        ),
        Panel(
            title="Slowest loop",
            text="Seconds since the last progress of the slowest loop.",
            expr=f"max by (instance) (imds_bridge_loop_progress_age_seconds{{{_ON}}})",
            legend="{{instance}}",
            unit="s",
            width=6,
        ),
        Panel(
            title="Memory",
            text="Resident memory of the process.",
            expr=f'process_resident_memory_bytes{{job=~"imds-bridge.*", {_ON}}}',
            legend="{{instance}}",
            unit="bytes",
        ),
        Panel(
            title="CPU",
            text="Of one core.",
            expr=f'rate(process_cpu_seconds_total{{job=~"imds-bridge.*", {_ON}}}[$__rate_interval])',
            legend="{{instance}}",
            unit="percentunit",
        ),
        Panel(
            title="Versions",
            text="Processes by version: two lines during an upgrade.",
            expr=f"count by (version) (imds_bridge_build_info{{{_ON}}})",
            legend="{{version}}",
        ),
    ),
}


def panels() -> list[Panel]:
    """Return every panel."""
    return [panel for row in ROWS.values() for panel in row]


def dashboard() -> str:
    """Return the dashboard in Grafana's JSON."""
    model = {
        "uid": "imds-bridge",
        "title": "imds-bridge",
        "description": "Azure Scheduled Events. The runbook is docs/operations.md.",
        "tags": ["azure", "imds-bridge"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_choice_of_datasource(), _choice_of_instances()]},
        "panels": list(_placed()),
    }
    return json.dumps(model, indent=2) + "\n"


def _choice_of_datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}


def _choice_of_instances() -> dict[str, Any]:
    query = "label_values(imds_bridge_build_info, instance)"
    return {
        "name": "instance",
        "type": "query",
        "label": "Instance",
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": "instance"},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _placed() -> Iterator[dict[str, Any]]:
    """Yield a heading for each row of panels, and the panels from left to right."""
    number = y = 0
    for title, row in ROWS.items():
        number += 1
        position = {"x": 0, "y": y, "w": _COLUMNS, "h": 1}
        yield {"id": number, "type": "row", "title": title, "gridPos": position, "panels": []}
        x, y = 0, y + 1
        for panel in row:
            if x + panel.width > _COLUMNS:
                x, y = 0, y + panel.height
            number += 1
            position = {"x": x, "y": y, "w": panel.width, "h": panel.height}
            yield {"id": number, **_panel(panel), "gridPos": position}
            x += panel.width
        y += row[-1].height


def _panel(panel: Panel) -> dict[str, Any]:
    target = {"refId": "A", "datasource": _DATASOURCE, "expr": panel.expr}
    if panel.legend:
        target["legendFormat"] = panel.legend
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.kind == "stat":
        defaults["thresholds"] = {"mode": "absolute", "steps": _thresholds(panel)}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [target],
    }


def _thresholds(panel: Panel) -> list[dict[str, Any]]:
    if panel.red_below is not None:
        return [{"color": "red", "value": None}, {"color": "green", "value": panel.red_below}]
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.red_above is not None:
        steps.append({"color": "red", "value": panel.red_above})
    return steps


if __name__ == "__main__":
    DASHBOARD.write_text(dashboard(), encoding="utf-8")
