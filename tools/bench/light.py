"""What the real process costs with one sink: until its first poll, each second, and after many polls."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from bridge.imds.client import EVENTS_PATH
from tools.bench import bus, simulators
from tools.bench.measure import BenchError, Progress, Row, paced
from tools.bench.process import REAL_POLL_SECONDS, Bridge, bare_mib, settings
from tools.bench.simulators import Remote

IMPORTS = "import pydantic, requests, sqlite3"
# The first model loads most of pydantic, which a bare import leaves out.
MODEL = "; pydantic.create_model('Model', field=(int, 1))()"
BUS_IMPORTS = "import azure.identity, azure.servicebus, pydantic, requests, sqlite3"
IDENTITY = "AZURE_POD_IDENTITY_AUTHORITY_HOST"  # where azure-identity looks for IMDS
CHANGES, CHANGE_SECONDS = 40, 0.25
STARTS = 15
SETTLE_SECONDS, SECONDS = 6, 30
POLLS, POLL_SECONDS = 1000, 0.01
FAST = (sys.executable, "-m", "tools.bench.fast_forward", str(POLL_SECONDS))
EVENTS_OF_ONE_CHANGE = {
    f"io.imdsbridge.{name}.v1" for name in ("document.changed", "scheduledevent.scheduled")
}
# What Microsoft's sample does, once a second.
SAMPLE = """
import requests, sys, time
due = time.monotonic()
while True:
    requests.get(sys.argv[1], headers={"Metadata": "true"}, params={"api-version": "2020-07-01"}).json()
    due += 1
    time.sleep(max(0, due - time.monotonic()))
"""


def start(folder: Path, progress: Progress) -> list[Row]:
    """Start the process again and again, and see when its first request comes."""
    progress.begin(f"start: {STARTS} starts, and {STARTS} bare imports, in turn")
    took: list[tuple[float, float]] = []
    with simulators.imds() as imds, simulators.inbox() as inbox:
        for number in range(STARTS + 1):
            process = Bridge(folder / str(number), settings(imds, inbox))
            took.append((_first_poll_ms(process, imds), _bare_ms()))
            progress.step(f"{number} of {STARTS}")
    ours, bare = map(median, zip(*took[1:], strict=True))  # the first warms the file cache and compiles
    return [
        Row(
            "start to first poll / bare imports of pydantic, requests, sqlite3, time",
            ours / bare,
            "x",
            f"medians {ours:.0f} and {bare:.0f} ms, {STARTS} each, from exec of `imds-bridge forward` with a new "
            "state to the request at the simulator, and of a process that does nothing from exec to exit",
            limit=1.4,
        )
    ]


def _bare_ms() -> float:
    began_at = time.monotonic()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, timeout=20)
    return (time.monotonic() - began_at) * 1000


def _first_poll_ms(process: Bridge, imds: Remote) -> float:
    """Start the process; return the time from its exec to its first request for the document."""
    began_at = time.monotonic()

    def polls() -> list[float]:
        return [one.at for one in imds("requests") if one.path == EVENTS_PATH and one.at >= began_at]

    with process:
        process.until(polls, apart_seconds=0.05)
    return (polls()[0] - began_at) * 1000


def whole(folder: Path, progress: Progress) -> list[Row]:
    """Let the process and one that does what the sample does poll once a second, and compare their CPU."""
    progress.begin(f"whole: the real process and the sample beside it, {SETTLE_SECONDS + SECONDS} s")
    with simulators.imds() as imds, simulators.inbox() as inbox:
        command = [sys.executable, "-c", SAMPLE, imds("url", simulators.VM) + EVENTS_PATH]
        with (
            Bridge(folder / "ours", settings(imds, inbox, poll_seconds=1)) as ours,
            subprocess.Popen(command) as theirs,
        ):
            try:
                time.sleep(SETTLE_SECONDS)
                before = len(imds("requests"))
                mine, sample = _us_of_a_second(ours.pid, theirs.pid, progress)
                ours.check_alive()
                polls = len(imds("requests")) - before
            finally:
                theirs.kill()
    if not 2 * SECONDS - 4 <= polls <= 2 * SECONDS + 4:
        raise BenchError(f"{polls} polls in {SECONDS} s of two processes that poll once a second")
    return [
        Row(
            "an unchanged poll, whole process / the documentation's sample, CPU",
            mine / sample,
            "x",
            f"means {mine:.0f} and {sample:.0f} us of CPU a second: the real command with one webhook sink and all "
            f"its threads, and a process that asks as the sample does, each once a second, for {SECONDS} s",
            limit=0.40,
        )
    ]


def _us_of_a_second(ours: int, theirs: int, progress: Progress) -> tuple[float, float]:
    """Return the mean CPU microseconds that each process spends in a second."""
    totals = []
    for number in paced(SECONDS + 1, 1):
        totals.append((_cpu_us(ours), _cpu_us(theirs)))
        progress.step(f"second {number} of {SECONDS}")
    mine, sample = (spent[-1] - spent[0] for spent in zip(*totals, strict=True))
    return mine / SECONDS, sample / SECONDS


def _cpu_us(pid: int) -> float:
    """Return the CPU that the threads of a process have spent, the kernel's share included."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text(encoding="ascii").split()[0]) for task in tasks) / 1000


def memory(folder: Path, progress: Progress) -> list[Row]:
    """Let the process poll a thousand times, and look at what it holds."""
    progress.begin(f"memory: {POLLS} polls of the real process")

    def polled() -> bool:
        done = len(imds("requests"))
        progress.step(f"{done} of {POLLS} polls")
        return done > POLLS

    with simulators.imds() as imds, simulators.inbox() as inbox:
        simulators.freeze(imds)
        with Bridge(folder / "memory", settings(imds, inbox), command=FAST) as process:
            process.until(polled, limit_seconds=60 + POLLS * POLL_SECONDS * 2, apart_seconds=1)
            rss, peak = process.memory()
        delivered = {json.loads(body)["type"] for _, body in simulators.bodies(inbox, "/hook")}
    if not delivered >= EVENTS_OF_ONE_CHANGE:
        raise BenchError(f"the process did not deliver its events, but {delivered}")
    return [
        Row(
            f"memory after {POLLS:,} polls, RSS",
            rss,
            "MiB",
            f"real command with the lower limit of poll_seconds lifted, {POLL_SECONDS:g} s apart, with one webhook "
            f"sink; peak {peak:.1f} MiB",
        ),
        bare_mib("pydantic, requests, sqlite3 imported", IMPORTS),
        bare_mib("the same, and one model of one field made", IMPORTS + MODEL),
    ]


def bus_memory(folder: Path, progress: Progress) -> list[Row]:
    """Let the process publish changes to Service Bus for a while, and look at what it holds."""
    progress.begin(f"bus-memory: {CHANGES} changes")
    with bus.lab(folder) as lab, simulators.imds() as imds:
        settings = {
            "imds": {"endpoint": imds("url", simulators.VM), "poll_seconds": REAL_POLL_SECONDS},
            "sinks": {"bench": {"kind": "servicebus", "topic": bus.TOPIC, **lab("reached_by")}},
        }
        event_id = simulators.freeze(imds)
        with Bridge(folder / "forward", settings, env={IDENTITY: lab("identity_url")}) as process:
            process.until(lambda: lab("asked_for_tokens"))
            for number in paced(CHANGES, CHANGE_SECONDS):
                imds("update", event_id, DurationInSeconds=1000 + number)
            # An event and its document each; two changes may fall into one poll.
            process.until(lambda: lab("counts", bus.TOPIC).enqueued >= 2 * CHANGES * 3 // 4)
            rss, peak = process.memory()
    return [
        Row(
            "memory of `forward` with Service Bus and managed identity, RSS",
            rss,
            "MiB",
            "real command, one Service Bus sink over TLS, a token from IMDS, "
            f"after {CHANGES} changes; peak {peak:.1f} MiB",
            limit=60,
        ),
        bare_mib("pydantic, requests, sqlite3, azure.identity, azure.servicebus imported", BUS_IMPORTS),
    ]
