"""Measure everything, print each row, write them as JSON."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from tools.bench.measure import Progress, Row, machine

# What is measured, by module and function; imported when it is measured, so that other groups' processes stay small.
GROUPS = {
    "whole": ("light.whole", "CPU of the real process while nothing changes, against one that only asks"),
    "latency": ("latency.rows", "a change in IMDS to its webhook received, against a bare requests.post"),
    "memory": ("light.memory", "RSS of the real process after 1,000 polls"),
    "start": ("light.start", "start of the real process to its first poll"),
    "commit": ("commit.rows", "a commit for two sinks, against a bare synced insert"),
    "drain": ("drain.rows", "rate and memory with 1,000 and 100,000 events waiting"),
    "recovery": ("recovery.rows", "receiver or IMDS back to the notice delivered or seen"),
    "commands": (
        "commands.rows",
        "commands a second off Service Bus, against receive and complete of the SDK",
    ),
    "approve-latency": ("approve.rows", "a command put on Service Bus to its POST at IMDS"),
    "relay-order": ("relay_order.rows", "the order from Service Bus to a webhook, on a busy machine"),
    "bus-memory": ("light.bus_memory", "RSS of `forward` with Service Bus and a managed identity"),
    "console": ("console.rows", "the console's store, pages, ingest and memory, against a bare insert"),
    "console-replaced": (
        "replaced.rows",
        "the console's pages of 10,000 VMs of which 5 % are replaced daily",
    ),
}
FOLDER = "/var/tmp"  # noqa: S108 - mkdtemp makes a private folder in it; /tmp is often in memory, where a sync costs nothing


def main() -> int:
    """Run the benchmark; return 1 if something could not be measured, whether limits are met or not."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        del os.environ[name]  # everything is on loopback
    progress = Progress()
    with tempfile.TemporaryDirectory(prefix="imds-bridge-bench-", dir=FOLDER) as folder:
        facts = machine(Path(folder))
        measured = {name: _measure(name, Path(folder, name), progress) for name in options.rows}
    for row in (row for rows in measured.values() for row in rows):
        print(_shown(row))
    print("\n" + ", ".join(f"{name} {value}" for name, value in facts.items()))
    if options.json:
        rows = [
            {"group": name, **asdict(row), "met": row.met} for name, rows in measured.items() for row in rows
        ]
        options.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=2) + "\n")
    return int(any(row.measured is None for rows in measured.values() for row in rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench",
        description="Measure imds-bridge on this machine (Linux), each row against its limit.",
        epilog="rows:\n" + "\n".join(f"  {name:16} {what}" for name, (_, what) in GROUPS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows as JSON, too")
    parser.add_argument(
        "--rows", type=_groups, default=[*GROUPS], metavar="A,B", help="only these (default: all)"
    )
    return parser.parse_args()


def _groups(text: str) -> Sequence[str]:
    chosen = text.split(",")
    if unknown := {*chosen} - GROUPS.keys():
        raise argparse.ArgumentTypeError(f"given {sorted(unknown)}, expected some of {', '.join(GROUPS)}")
    return chosen


def _measure(name: str, folder: Path, progress: Progress) -> Sequence[Row]:
    """Measure one group in a folder of its own; a failure becomes a row, and the other groups are still measured."""
    folder.mkdir()
    module, _, function = GROUPS[name][0].partition(".")
    try:
        rows: Sequence[Row] = getattr(import_module(f"tools.bench.{module}"), function)(folder, progress)
    except Exception as error:  # noqa: BLE001 - the other rows are still of use
        progress.begin(f"{name}: not measured: {error!r}")
        return [Row(name, None, "", f"not measured: {error!r}")]
    return rows


def _shown(row: Row) -> str:
    if row.measured is None:
        return f"{row.name}: FAILED\n    {row.how}"
    digits = {"x": 2, "us": 1, "MiB": 1, "ms": 1 if row.measured < 100 else 0}.get(row.unit, 0)
    limit = "" if row.limit is None else f"{'>=' if row.at_least else '<='} {row.limit:g}"
    verdict = {True: "met", False: "MISSED", None: ""}[row.met]
    return (
        f"{row.name:<78} {row.measured:>8,.{digits}f} {row.unit:<3} {limit:>7} {verdict}".rstrip()
        + f"\n    {row.how}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
