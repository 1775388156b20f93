"""Measure everything, print one table, write it as JSON."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.bench import drain, event, latency, poll, process, whole
from tests.bench.measure import BenchError, Progress, Row, file_system, load, machine

Measure = Callable[[Path, Progress], list[Row]]


def _later(module: str, function: str = "rows") -> Measure:
    """Import a group's module when it is measured, so that other groups' processes stay small."""

    def measure(folder: Path, progress: Progress) -> list[Row]:
        rows: list[Row] = getattr(import_module(f"tests.bench.{module}"), function)(folder, progress)
        return rows

    return measure


GROUPS: dict[str, Measure] = {
    "poll": poll.rows,
    "whole": whole.rows,
    "event": event.rows,
    "latency": latency.rows,
    "memory": process.memory_rows,
    "start": process.start_rows,
    "drain": drain.rows,
    "recovery": _later("recovery"),
    "bus-drain": _later("bus_drain"),
    "commands": _later("bus_commands"),
    "approve-latency": _later("bus_latency"),
    "relay-order": _later("relay_order"),
    "bus-memory": _later("bus_memory"),
    "console": _later("console"),
}
HOW_WIDTH = 80
EXAMPLES = """\
rows:
  poll             CPU of a poll that finds nothing new, against the documentation's sample
  whole            CPU of the real process while nothing changes, against a process that asks as the sample does
  event            CPU of building, identifying and encoding an event, against `cloudevents`
  latency          a change in IMDS to its webhook received, against a bare requests.post
  memory           RSS of the real process after 1,000 polls, without and with the metrics port
  start            start of the real process to its first poll, without and with the metrics port
  drain            rate and memory with 1,000, 10,000 and 100,000 events waiting
  recovery         receiver or IMDS back to the notice delivered or seen
  bus-drain        events a second to Service Bus, against the bare SDK
  commands         commands a second off Service Bus, against the bare SDK's receive and complete
  approve-latency  a command put on Service Bus to its POST at IMDS
  relay-order      the order of events from Service Bus to a webhook, on a busy machine
  bus-memory       RSS of `forward` and `listen` with Service Bus and a managed identity
  console          the console's store, pages, ingest and memory, against a bare insert

examples:
  python -m tests.bench                               the whole table, in about eight minutes
  python -m tests.bench --json bench.json             and as JSON, with facts of the machine
  python -m tests.bench --rows latency,drain          two groups of rows
  python -m tests.bench --rows memory --real-pace     1,000 polls at 0.2 s, the unmodified command

exit codes: 0 measured, whether limits are met or not; 1 something could not be measured; 2 usage
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    for wanted in filter(None, (arguments.dir, arguments.json and arguments.json.resolve().parent)):
        if not wanted.is_dir():
            parser.error(f"{wanted}: there is no such folder")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        del os.environ[name]  # everything is on loopback
    progress = Progress()
    groups = dict(GROUPS)
    groups["memory"] = partial(process.memory_rows, real_pace=arguments.real_pace)
    load_before = load()
    folder = Path(tempfile.mkdtemp(prefix="imds-bridge-bench-", dir=arguments.dir or _durable_folder()))
    try:
        facts = machine(folder)
        measured = {name: _measure(name, groups[name], folder, progress) for name in arguments.rows}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    facts["load_before_and_after"] = [load_before, load()]
    progress.begin("done")
    rows = [row for group in measured.values() for row in group]
    print(_table(rows))
    print("\n" + ", ".join(f"{name} {value}" for name, value in facts.items()))
    if facts["file_system"] == "tmpfs":
        print("The file system is in memory: a sync costs nothing there. Choose another with --dir.")
    if arguments.json:
        _write(arguments.json, measured, facts, progress.seconds)
    return 1 if any(row.measured is None for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench",
        description="Measure imds-bridge on this machine (Linux), each row against its limit.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows as JSON, too")
    parser.add_argument(
        "--rows", type=_groups, default=list(GROUPS), metavar="A,B", help="only these (default: all)"
    )
    parser.add_argument(
        "--real-pace", action="store_true", help="poll for `memory` as a configuration may: 200 s"
    )
    parser.add_argument(
        "--dir",
        type=Path,
        metavar="FOLDER",
        help="where state is kept meanwhile, about 200 MB (default: that for temporary files, or /var/tmp "
        "where that one is in memory and a sync would cost nothing)",
    )
    return parser


def _groups(text: str) -> list[str]:
    chosen = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in chosen if name not in GROUPS]
    if unknown or not chosen:
        raise argparse.ArgumentTypeError(f"given {text!r}, expected some of {', '.join(GROUPS)}")
    return [name for name in GROUPS if name in chosen]


def _durable_folder() -> str | None:
    """Choose a folder for temporary files that survive a reboot: /tmp is often in memory."""
    usual = Path(tempfile.gettempdir())
    lasting = Path("/var/tmp")  # noqa: S108 - mkdtemp makes a private folder in it
    return str(lasting) if file_system(usual) == "tmpfs" and lasting.is_dir() else None


def _measure(name: str, measure: Measure, folder: Path, progress: Progress) -> list[Row]:
    """Measure one group in a folder of its own; a failure becomes a row, and the other groups are still measured."""
    try:
        (folder / name).mkdir()
        return measure(folder / name, progress)
    except BenchError as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - the other rows are still of use
        reason = f"{type(error).__name__}: {error}"
    progress.begin(f"{name}: not measured: {reason}")
    return [Row(name=name, measured=None, how=f"not measured: {reason}")]


def _table(rows: Sequence[Row]) -> str:
    """Format the rows as a table; the last column is wrapped."""
    lines = [["ROW", "MEASURED", "LIMIT", "", "HOW"]]
    for row in rows:
        cells = [row.name, _figure(row.measured, row.unit), _limit(row), _verdict(row)]
        how = textwrap.wrap(row.how, HOW_WIDTH) or [""]
        lines.append([*cells, how[0]])
        lines += [["", "", "", "", more] for more in how[1:]]
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    return "\n".join(
        "  ".join(
            [*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]
        ).rstrip()
        for line in lines
    )


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    digits = {"x": 2, "us": 1, "MiB": 1, "ms": 1 if value < 100 else 0}.get(unit, 0)
    return f"{value:,.{digits}f} {unit}"


def _limit(row: Row) -> str:
    if row.limit is None:
        return ""
    return f"{'>=' if row.at_least else '<='} {row.limit:g} {row.unit}"


def _verdict(row: Row) -> str:
    return {True: "met", False: "MISSED", None: ""}[row.met] if row.measured is not None else "FAILED"


def _write(path: Path, measured: dict[str, list[Row]], facts: dict[str, Any], seconds: float) -> None:
    report = {
        "machine": facts,
        "seconds": round(seconds, 1),
        "rows": [
            {
                "group": group,
                "name": row.name.strip(),
                "measured": None if row.measured is None else round(row.measured, 4),
                "unit": row.unit,
                "limit": row.limit,
                "at_least": row.at_least,
                "met": row.met,
                "how": row.how,
                "details": row.details,
            }
            for group, rows in measured.items()
            for row in rows
        ],
    }
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
