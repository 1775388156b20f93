"""A picture of the dashboard from a real run: `python -m tests.support.dashboard_picture` writes dashboard.svg.

Prometheus scrapes the real `forward` and `listen`, which run against the simulators while a receiver fails, IMDS
fails, and a command approves an event; the panels are drawn from Prometheus' API. It takes two minutes.
"""

from __future__ import annotations

import itertools
import math
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from html import escape
from pathlib import Path
from typing import Any, Literal

from infra.monitoring.generate import FOLDER, Panel, panels
from tests.support.bus import QUEUE, TOPIC, Sender, bus_config, command
from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox
from tests.support.ports import free_port
from tests.support.process import Forward, wait_until
from tests.support.prometheus import Prometheus, prometheus
from tests.support.servicebus import ServiceBusLab

PICTURE = FOLDER / "dashboard.svg"
RUN_SECONDS = 110
SCRAPE_SECONDS = 1

ROLES: tuple[Literal["forward", "listen"], ...] = ("forward", "listen")
PORTS = {role: free_port() for role in ROLES}
COLUMN, LINE, GAP, LEGEND_LINE = 45, 24, 6, 13
COLORS = ("#1f60c4", "#c4162a", "#37872d", "#e0b400", "#8f3bb8", "#fa6400", "#5794f2", "#96d98d")
Lines = dict[str, list[tuple[float, float]]]  # the times and values of each, by its legend


def main() -> None:
    """Run everything, and draw."""
    with tempfile.TemporaryDirectory(prefix="imds-bridge-picture-") as name, ExitStack() as stack:
        folder = Path(name)
        imds = stack.enter_context(ImdsLab(vms=["web-0", "web-1"]))
        inbox = stack.enter_context(Inbox())
        bus = stack.enter_context(ServiceBusLab(bus_config()))
        forward, _ = (
            stack.enter_context(Forward(folder / role, _settings(PORTS[role], imds, inbox, bus), role=role))
            for role in ROLES
        )
        targets = {f"web-0/{role}": port for role, port in PORTS.items()}
        running = stack.enter_context(prometheus(folder, targets, every_seconds=SCRAPE_SECONDS))
        wait_until(lambda: running.has("imds_bridge_build_info", len(PORTS)))
        start = time.time()
        _play(imds, inbox, bus, forward, until=start + RUN_SECONDS)
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


def _play(imds: ImdsLab, inbox: Inbox, bus: ServiceBusLab, forward: Forward, *, until: float) -> None:
    """Let events come and go, send two commands, let a receiver and then IMDS fail for a while, and restart."""
    part = (until - time.time()) / 12
    time.sleep(part)
    for event_type in ("Freeze", "Reboot"):
        imds.schedule(event_type=event_type, resources=["web-0"], notice_seconds=900)
    time.sleep(part)
    with Sender(bus) as sender:
        approved = imds.schedule(event_type="Redeploy", resources=["web-0"], event_source="User", hold=True)
        time.sleep(part)
        denied = imds.events[0]["EventId"]
        sender.send(command(approved, Vm="web-0"), command(denied, Vm="web-0"))
        time.sleep(part)
    imds.start(approved)
    inbox.fault(503, count=None)
    time.sleep(part)
    imds.complete(approved)
    imds.schedule(event_type="Preempt", resources=["web-0"], notice_seconds=30)
    time.sleep(2 * part)
    inbox.clear_faults()
    time.sleep(part)
    imds.fault(503, count=None)
    time.sleep(part)
    imds.clear_faults()
    time.sleep(part)
    forward.stop()
    forward.start()
    time.sleep(until - time.time())


def read(running: Prometheus, panel: Panel, start: float, end: float) -> Lines:
    """Return what Grafana would draw in a panel."""
    found = {}
    for expr, legend in panel.queries:
        query = expr.replace("$__rate_interval", "15s").replace("$instance", ".*")
        for one in running.ask("query_range", query=query, start=start, end=end, step=SCRAPE_SECONDS):
            name = re.sub(r"{{(\w+)}}", lambda label: one["metric"].get(label[1], label[0]), legend)  # noqa: B023
            points = [(at, float(value)) for at, value in one["values"] if value not in ("NaN", "+Inf")]
            if points:
                found[name] = points
    return found


def draw(running: Prometheus, start: float, end: float) -> str:
    """Return the picture of all panels."""
    parts: list[str] = []
    for panel in panels():
        x, y = panel.place["x"] * COLUMN + GAP, panel.place["y"] * LINE + GAP
        if not panel.queries:
            parts.append(_text(x, y + 18, panel.title, size=16, weight="bold"))
            continue
        width, height = panel.place["w"] * COLUMN - GAP, panel.place["h"] * LINE - GAP
        found = read(running, panel, start, end)
        if not found:
            drawn = _text(6, height / 2, "no data")
        elif panel.kind == "stat":
            value = next(iter(found.values()))[-1][1]
            drawn = _text(10, height - 22, _amount(value, panel.unit), size=28, color=COLORS[2])
        else:
            drawn = _draw_graph(panel, found, width, height, (start, end))
        frame = f'<rect width="{width}" height="{height}" fill="#fff" stroke="#ddd"/>'
        title = _text(6, 15, panel.title, weight="bold")
        parts.append(f'<g transform="translate({x},{y})">{frame}{title}{drawn}</g>')
    y = max(panel.place["y"] + panel.place["h"] for panel in panels()) * LINE + GAP
    size = f'width="{24 * COLUMN + GAP}" height="{y + GAP}"'
    style = 'font-family="sans-serif" font-size="11" fill="#333"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n<rect {size} fill="#f4f5f5"/>\n{body}\n</svg>\n'


def _draw_graph(panel: Panel, found: Lines, width: int, height: int, times: tuple[float, float]) -> str:
    legends = list(_legends(found, width))
    left, top, bottom = 58, 26, height - 20 - LEGEND_LINE * (legends[-1][1] + 1)
    start, end = times
    highest = max(0.0, *(value for points in found.values() for _, value in points)) or 1.0
    across, down = (width - 8 - left) / (end - start), (bottom - top) / highest
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = bottom - share * (bottom - top)
        parts.append(f'<path d="M{left} {y:.1f}H{width - 8}" stroke="#e8e8e8"/>')
        parts.append(_text(4, y + 4, _amount(highest * share, panel.unit), size=10))
    for (legend, points), (x, line), color in zip(
        found.items(), legends, itertools.cycle(COLORS), strict=False
    ):
        placed = " ".join(
            f"{left + (at - start) * across:.1f},{bottom - max(value, 0) * down:.1f}"
            for at, value in _bends(points)
        )
        parts.append(f'<polyline points="{placed}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        parts.append(_text(x, bottom + 20 + LEGEND_LINE * line, legend, size=10, color=color))
    return "".join(parts)


def _bends(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points without those within a level part of the line."""
    edge = (0.0, math.nan)
    around = zip([edge, *points], points, [*points[1:], edge], strict=False)
    return [one for before, one, after in around if not before[1] == one[1] == after[1]]


def _legends(found: Lines, width: int) -> Iterator[tuple[float, int]]:
    """Give where each legend begins, and on which line below the graph."""
    x, line = 8.0, 0
    for legend in found:
        if x > 8 and x + 5.5 * len(legend) > width:
            x, line = 8.0, line + 1
        yield x, line
        x += 5.5 * len(legend) + 10


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
