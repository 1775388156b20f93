"""The real process: its memory after many polls, and how soon its first poll comes."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from tests.bench import simulators
from tests.bench.measure import ROOT, BenchError, Progress, Row, memory_mib, spread, wait_until
from tests.bench.simulators import Remote

POLLS = 1000
FAST_POLL_SECONDS = 0.01
REAL_POLL_SECONDS = 0.2  # the shortest that a configuration may ask for
STARTS = 15
METRICS = "[metrics]\nlisten = '127.0.0.1:0'\n"
IMPORTS = "import pydantic, requests, sqlite3"
BARE_RUNS = 5
EVENTS_OF_ONE_CHANGE = {
    f"io.imdsbridge.{name}.v1" for name in ("document.changed", "scheduledevent.scheduled")
}


def memory_rows(folder: Path, progress: Progress, *, real_pace: bool = False) -> list[Row]:
    """Let the process poll a thousand times, and look at what it holds."""
    poll_seconds = REAL_POLL_SECONDS if real_pace else FAST_POLL_SECONDS
    progress.begin(f"memory: {POLLS} polls of the real process, {poll_seconds:g} s apart")
    rss, peak = _after_polls(folder / "memory", progress, poll_seconds)
    progress.begin(f"memory: {POLLS} polls with the metrics port, {poll_seconds:g} s apart")
    metrics_rss, metrics_peak = _after_polls(folder / "memory-metrics", progress, poll_seconds, METRICS)
    bare = [bare_imports_mib(IMPORTS) for _ in range(BARE_RUNS)]
    pace = "real command" if real_pace else "real command with the lower limit of poll_seconds lifted"
    return [
        Row(
            name=f"memory after {POLLS:,} polls, RSS",
            measured=rss,
            unit="MiB",
            limit=36,
            how=f"{pace}, {poll_seconds:g} s apart, with one webhook sink; peak {peak:.1f} MiB",
            details={"rss_mib": round(rss, 2), "peak_mib": round(peak, 2), "poll_seconds": poll_seconds},
        ),
        Row(
            name="  the same with the metrics port, RSS",
            measured=metrics_rss,
            unit="MiB",
            how=f"scraped once a second; {metrics_rss - rss:+.1f} MiB; peak {metrics_peak:.1f} MiB",
            details={"rss_mib": round(metrics_rss, 2), "peak_mib": round(metrics_peak, 2)},
        ),
        Row(
            name="  beside it: pydantic, requests, sqlite3 imported, RSS",
            measured=statistics.median(bare),
            unit="MiB",
            how=f"median of {BARE_RUNS} processes that do nothing else",
            details={"rss_mib": spread(bare)},
        ),
    ]


def _after_polls(state: Path, progress: Progress, poll_seconds: float, more: str = "") -> tuple[float, float]:
    """Return RSS and its peak of a process that has polled a thousand times; a metrics port is scraped meanwhile."""
    with simulators.imds() as imds, simulators.inbox() as inbox:
        imds("schedule", event_type="Freeze", resources=[simulators.VM], notice_seconds=86_400)
        config = write_config(state, imds, inbox, more=more)
        with _forward(config, state, poll_seconds) as process:

            def polled() -> bool:
                done = imds("count")
                progress.step(f"{done} of {POLLS} polls")
                check_alive(process, state)
                if more:
                    _scrape(state)
                return bool(done > POLLS)

            limit_seconds = POLLS * poll_seconds * 2 + 60
            wait_until(polled, what=f"poll {POLLS}", limit_seconds=limit_seconds, every_seconds=1)
            figures = memory_mib("VmRSS", process.pid), memory_mib("VmHWM", process.pid)
        delivered = [event["type"] for _, event in inbox("arrivals", "/hook")]
        if EVENTS_OF_ONE_CHANGE - set(delivered):
            raise BenchError(f"the process did not deliver its events, but {delivered}")
    return figures


def _scrape(state: Path) -> None:
    """Scrape the metrics port that the process names in its log, once it does."""
    lines = map(json.loads, _log_of(state).read_text(encoding="utf-8").splitlines())
    if port := next((line["port"] for line in lines if "port" in line), None):
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            answer.read()


def start_rows(folder: Path, progress: Progress) -> list[Row]:
    """Start the process again and again, and see when its first request comes."""
    progress.begin(
        f"start: {STARTS} starts, as many with the metrics port, and {STARTS} bare imports, in turn"
    )
    starts: list[float] = []
    metrics: list[float] = []
    bare: list[float] = []
    with simulators.imds() as imds, simulators.inbox() as inbox:
        for number in range(-1, STARTS):
            first_ms = _first_poll_ms(folder / f"start{number}", imds, inbox)
            metrics_ms = _first_poll_ms(folder / f"start-metrics{number}", imds, inbox, METRICS)
            began_at = time.monotonic()
            subprocess.run([sys.executable, "-c", IMPORTS], check=True, timeout=20)
            bare_ms = (time.monotonic() - began_at) * 1000
            if number >= 0:  # the first warms the file cache and compiles
                starts.append(first_ms)
                metrics.append(metrics_ms)
                bare.append(bare_ms)
            progress.step(f"{number} of {STARTS}")
    return [
        Row(
            name="start to first poll / bare imports of pydantic, requests, sqlite3, time",
            measured=statistics.median(starts) / statistics.median(bare),
            unit="x",
            limit=0.9,
            how=f"medians {statistics.median(starts):.0f} and {statistics.median(bare):.0f} ms, {STARTS} each: "
            "from exec of `imds-bridge forward` with a new state to the request at the simulator, and a process that "
            "does nothing else from exec to exit",
            details={"start_ms": spread(starts, digits=1), "imports_ms": spread(bare, digits=1)},
        ),
        Row(
            name="  the metrics port adds to the start",
            measured=statistics.median(metrics) - statistics.median(starts),
            unit="ms",
            how=f"the difference of the medians, {statistics.median(metrics):.0f} ms with the port, {STARTS} each",
            details={"start_ms": spread(metrics, digits=1)},
        ),
    ]


def _first_poll_ms(state: Path, imds: Remote, inbox: Remote, more: str = "") -> float:
    """Start the process; return the time from its exec to its first request."""
    config = write_config(state, imds, inbox, more=more)
    began_at = time.monotonic()
    with running("forward", config, state) as process:

        def polled() -> bool:
            check_alive(process, state)
            return bool(imds("polls_after", began_at))

        wait_until(polled, what="the first poll", limit_seconds=20, every_seconds=0.05)
    first: float = imds("polls_after", began_at)[0]
    return (first - began_at) * 1000


def write_config(
    state: Path, imds: Remote, inbox: Remote, *, poll_seconds: float = REAL_POLL_SECONDS, more: str = ""
) -> Path:
    """Write a configuration with one webhook sink, and more tables; return its path."""
    path = state.with_suffix(".toml")
    # A JSON string is a TOML string as well.
    path.write_text(
        f"state_dir = {json.dumps(str(state))}\n"
        f"[imds]\nendpoint = {json.dumps(imds('base_url'))}\n"
        f"poll_seconds = {poll_seconds}\n"
        f"[sinks.bench]\nkind = 'webhook'\nurl = {json.dumps(inbox('hook_url', '/hook'))}\n{more}",
        encoding="utf-8",
    )
    return path


@contextmanager
def _forward(config: Path, state: Path, poll_seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    """Run `imds-bridge forward`; faster than any configuration may ask where `poll_seconds` says so."""
    if poll_seconds >= REAL_POLL_SECONDS:
        with running("forward", config, state) as process:
            yield process
        return
    command = [sys.executable, "-m", "tests.bench.fast_forward", str(config), str(poll_seconds)]
    with started(command, state) as process:
        yield process


@contextmanager
def running(role: str, config: Path, state: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the unmodified command until the end of the block."""
    command = [_installed_command(), role, "--config", str(config)]
    with started(command, state) as process:
        yield process


@contextmanager
def started(
    command: Sequence[str], state: Path, more: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command until the end of the block, its log beside `state`, with `more` in its environment."""
    # An installed program is compiled, too.
    left_out = ("IMDS_BRIDGE__", "PYTHONDONTWRITEBYTECODE")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    with (
        _log_of(state).open("wb") as log,
        subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=log, env={**environ, **(more or {})}
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def _installed_command() -> str:
    beside = Path(sys.executable).with_name("imds-bridge")
    command = str(beside) if beside.exists() else shutil.which("imds-bridge")
    if command is None:
        raise BenchError("the command imds-bridge is not installed in this environment")
    return command


def _log_of(state: Path) -> Path:
    return state.with_suffix(".log")


def check_alive(process: subprocess.Popen[bytes], state: Path) -> None:
    """Raise BenchError with the end of its log if the process has ended."""
    if process.poll() is not None:
        log_end = _log_of(state).read_text(encoding="utf-8", errors="replace")[-500:]
        raise BenchError(f"`imds-bridge` ended with {process.returncode}: {log_end}")


def bare_imports_mib(imports: str) -> float:
    """Return the RSS of a process that imports and does nothing else."""
    output = subprocess.run(
        [sys.executable, "-c", f"{imports}; print(open('/proc/self/status').read())"],
        check=True,
        timeout=20,
        capture_output=True,
        text=True,
    ).stdout
    (line,) = (line for line in output.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024
