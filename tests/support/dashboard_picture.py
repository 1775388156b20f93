"""A picture of the dashboard from a real run: `python -m tests.support.dashboard_picture` writes dashboard.svg.

Prometheus scrapes the real `forward` and `listen`, which run against the simulators while a receiver fails, IMDS
fails, and a command approves an event; the panels are drawn from Prometheus' API. It takes two minutes.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

from infra.monitoring.generate import FOLDER, Panel, panels
from tests.support.bus import QUEUE, TOPIC, Sender, bus_config, command
from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox
from tests.support.process import Forward, wait_until
from tests.support.prometheus import Prometheus, free_port, prometheus
from tests.support.servicebus import ServiceBusLab

PICTURE = FOLDER / "dashboard.svg"
RUN_SECONDS = 110
SCRAPE_SECONDS = 1

ROLES: tuple[Literal["forward", "listen"], ...] = ("forward", "listen")
PORTS = {role: free_port() for role in ROLES}
COLUMN, LINE, GAP = 45, 24, 6
COLORS = ("#1f60c4", "#c4162a", "#37872d", "#e0b400", "#8f3bb8", "#fa6400", "#5794f2", "#96d98d")


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a graph: its legend, and its values by time."""

    legend: str
    points: Sequence[tuple[float, float]]


def main() -> None:
    """Run everything, and draw."""
    with tempfile.TemporaryDirectory(prefix="imds-bridge-picture-") as name, ExitStack() as stack:
        folder = Path(name)
        imds = stack.enter_context(ImdsLab(vms=["web-0", "web-1"]))
        inbox = stack.enter_context(Inbox())
        bus = stack.enter_context(ServiceBusLab(bus_config()))
        for role in ROLES:
            stack.enter_context(Forward(folder / role, _settings(PORTS[role], imds, inbox, bus), role=role))
        targets = {f"web-0/{role}": port for role, port in PORTS.items()}
        running = stack.enter_context(prometheus(folder, targets, every_seconds=SCRAPE_SECONDS))
        wait_until(lambda: running.has("imds_bridge_build_info", len(PORTS)))
        start = time.time()
        _play(imds, inbox, bus, until=start + RUN_SECONDS)
        PICTURE.write_text(draw(running, start, time.time()), encoding="utf-8")


def _settings(port: int, imds: ImdsLab, inbox: Inbox, bus: ServiceBusLab) -> dict[str, Any]:
    sinks = {
        "audit": {"kind": "servicebus", "connection_string": bus.connection_string, "topic": TOPIC},
        "ops": {"kind": "webhook", "url": inbox.url},
    }
    approvals = {
        "connection_string": bus.connection_string,
        "queue": QUEUE,
        "policy": {"allow": [{"event_source": ["User"]}]},
    }
    return {
        "imds": {"endpoint": imds.url("web-0")},
        "metrics": {"listen": f"127.0.0.1:{port}"},
        "sinks": sinks,
        "approvals": approvals,
    }


def _play(imds: ImdsLab, inbox: Inbox, bus: ServiceBusLab, *, until: float) -> None:
    """Let events come and go, send two commands, and let a receiver and then IMDS fail for a while."""
    wait = threading.Event().wait
    steps = (until - time.time()) / 11
    wait(steps)
    for event_type in ("Freeze", "Reboot"):
        imds.schedule(event_type=event_type, resources=["web-0"], notice_seconds=900)
    wait(steps)
    with Sender(bus) as sender:
        approved = imds.schedule(event_type="Redeploy", resources=["web-0"], event_source="User", hold=True)
        wait(steps)
        denied = imds.events[0]["EventId"]
        sender.send(command(approved, Vm="web-0"), command(denied, Vm="web-0"))
        wait(steps)
    imds.start(approved)
    inbox.fault(503, count=None)
    wait(steps)
    imds.complete(approved)
    imds.schedule(event_type="Preempt", resources=["web-0"], notice_seconds=30)
    wait(2 * steps)
    inbox.clear_faults()
    wait(steps)
    imds.fault(503, count=None)
    wait(steps)
    imds.clear_faults()
    wait(until - time.time())


def read(running: Prometheus, panel: Panel, start: float, end: float) -> list[Series]:
    """Return what Grafana would draw in a panel."""
    query = panel.expr.replace("$__rate_interval", "15s").replace("$instance", ".*")
    found = running.ask("query_range", query=query, start=start, end=end, step=SCRAPE_SECONDS)
    return [
        Series(
            legend=_legend(panel, one["metric"]),
            points=[(at, float(value)) for at, value in one["values"] if value not in ("NaN", "+Inf")],
        )
        for one in found
    ]


def _legend(panel: Panel, labels: dict[str, str]) -> str:
    text = panel.legend
    for name, value in labels.items():
        text = text.replace(f"{{{{{name}}}}}", value)
    return text


def draw(running: Prometheus, start: float, end: float) -> str:
    """Return the picture of all panels."""
    parts: list[str] = []
    for panel in panels():
        x, y = panel.place["x"] * COLUMN + GAP, panel.place["y"] * LINE + GAP
        if not panel.expr:
            parts.append(_text(x, y + 18, panel.title, size=16, weight="bold"))
            continue
        width, height = panel.place["w"] * COLUMN - GAP, panel.place["h"] * LINE - GAP
        drawn = _draw_panel(panel, read(running, panel, start, end), width, height, (start, end))
        parts.append(f'<g transform="translate({x},{y})">{drawn}</g>')
    y = max(panel.place["y"] + panel.place["h"] for panel in panels()) * LINE + GAP
    size = f'width="{24 * COLUMN + GAP}" height="{y + GAP}"'
    style = 'font-family="sans-serif" font-size="11" fill="#333"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n<rect {size} fill="#f4f5f5"/>\n{body}\n</svg>\n'


def _draw_panel(
    panel: Panel, found: list[Series], width: int, height: int, time_range: tuple[float, float]
) -> str:
    frame = f'<rect width="{width}" height="{height}" fill="#fff" stroke="#ddd"/>'
    title = _text(6, 15, panel.title, weight="bold")
    if not any(series.points for series in found):
        return frame + title + _text(6, height / 2, "no data")
    if panel.kind == "stat":
        return frame + title + _draw_stat(panel, found[0].points[-1][1], height)
    return frame + title + _draw_graph(panel, found, width, height, time_range)


def _draw_stat(panel: Panel, value: float, height: int) -> str:
    return _text(10, height - 22, _amount(value, panel.unit), size=28, color=COLORS[2])


def _draw_graph(
    panel: Panel, found: list[Series], width: int, height: int, time_range: tuple[float, float]
) -> str:
    left, top, bottom = 58, 26, height - 34
    start, end = time_range
    highest = max(value for series in found for _, value in series.points) or 1.0
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = bottom - share * (bottom - top)
        parts.append(f'<path d="M{left} {y:.1f}H{width - 8}" stroke="#e8e8e8"/>')
        parts.append(_text(4, y + 4, _amount(highest * share, panel.unit), size=10))
    x = float(left)
    shown = [series for series in found if series.points]
    for series, color in zip(shown, COLORS * len(shown), strict=False):
        placed = [
            (
                left + (at - start) / (end - start) * (width - 8 - left),
                bottom - value / highest * (bottom - top),
            )
            for at, value in series.points
        ]
        points = " ".join(f"{across:.1f},{down:.1f}" for across, down in placed)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        across = 6.0 * len(series.legend) + 10
        if x + across <= width + 20:
            parts.append(_text(x, height - 10, series.legend, size=10, color=color))
        x += across
    return "".join(parts)


def _amount(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{value / 2**20:.1f} MiB"
    if unit == "percentunit":
        return f"{value:.1%}"
    number = f"{value:.3g}" if value < 1000 else f"{value:.0f}"
    return number + {"s": " s", "reqps": "/s"}.get(unit, "")


def _text(
    x: float, y: float, text: str, *, size: int = 12, weight: str = "normal", color: str = "#333"
) -> str:
    style = f'font-size="{size}" font-weight="{weight}" fill="{color}"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{escape(text)}</text>'


if __name__ == "__main__":
    main()
