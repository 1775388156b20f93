"""The real process: its memory after many polls."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

from tests.bench import simulators
from tests.bench.measure import BenchError, Progress, Row
from tests.bench.process import Bridge, bare_imports_mib, settings
from tests.bench.start import IMPORTS, METRICS

POLLS = 1000
POLL_SECONDS = 0.01
FAST = (sys.executable, "-m", "tests.bench.fast_forward", str(POLL_SECONDS))
BARE_RUNS = 5
# The first model loads most of pydantic, which a bare import leaves out.
MODEL = "; pydantic.create_model('Model', field=(int, 1))()"
EVENTS_OF_ONE_CHANGE = {
    f"io.imdsbridge.{name}.v1" for name in ("document.changed", "scheduledevent.scheduled")
}


def rows(folder: Path, progress: Progress) -> list[Row]:
    """Let the process poll a thousand times, and look at what it holds."""
    progress.begin(f"memory: {POLLS} polls of the real process, without and with the metrics port")
    rss, peak = _after_polls(folder / "memory", progress)
    metrics_rss, metrics_peak = _after_polls(folder / "metrics", progress, scraped=True)
    bare, used = ([bare_imports_mib(code) for _ in range(BARE_RUNS)] for code in (IMPORTS, IMPORTS + MODEL))
    return [
        Row(
            name=f"memory after {POLLS:,} polls, RSS",
            measured=rss,
            unit="MiB",
            limit=40,
            how=f"real command with the lower limit of poll_seconds lifted, {POLL_SECONDS:g} s apart, with one "
            f"webhook sink; peak {peak:.1f} MiB",
        ),
        Row(
            name="  the same with the metrics port, RSS",
            measured=metrics_rss,
            unit="MiB",
            how=f"scraped once a second; {metrics_rss - rss:+.1f} MiB; peak {metrics_peak:.1f} MiB",
        ),
        Row(
            name="  beside it: pydantic, requests, sqlite3 imported, RSS",
            measured=statistics.median(bare),
            unit="MiB",
            how=f"median of {BARE_RUNS} processes that do nothing else",
        ),
        Row(
            name="  beside it: the same, and one model of one field made, RSS",
            measured=statistics.median(used),
            unit="MiB",
            how=f"median of {BARE_RUNS} processes that do nothing else",
        ),
    ]


def _after_polls(folder: Path, progress: Progress, *, scraped: bool = False) -> tuple[float, float]:
    """Return RSS and its peak of a process that has polled a thousand times; a metrics port is scraped meanwhile."""
    with simulators.imds() as imds, simulators.inbox() as inbox:
        imds("schedule", event_type="Freeze", resources=[simulators.VM], notice_seconds=86_400)
        chosen = settings(imds, inbox, **(METRICS if scraped else {}))
        with Bridge(folder, chosen, command=FAST) as process:
            process.until(
                _polled(imds, progress, process, scraped=scraped),
                limit_seconds=POLLS * POLL_SECONDS * 2 + 60,
                apart_seconds=1,
            )
            figures = process.memory()
        delivered = {event["type"] for _, event in inbox("arrivals", "/hook")}
        if not delivered >= EVENTS_OF_ONE_CHANGE:
            raise BenchError(f"the process did not deliver its events, but {delivered}")
    return figures


def _polled(
    imds: simulators.Remote, progress: Progress, process: Bridge, *, scraped: bool
) -> Callable[[], bool]:
    """Return what says whether the process has polled often enough."""

    def polled() -> bool:
        done: int = imds("count")
        progress.step(f"{done} of {POLLS} polls")
        if scraped:
            _scrape(process)
        return done > POLLS

    return polled


def _scrape(process: Bridge) -> None:
    """Scrape the metrics port that the process names in its log, once it does."""
    if port := next((line["port"] for line in process.lines() if "port" in line), None):
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            answer.read()
