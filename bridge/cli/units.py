"""The systemd units of the processes: whether they are enabled, and run."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

BOOTED = Path("/run/systemd/system")  # sd_booted(3)
STATE_DIR = Path("/var/lib/imds-bridge")  # of the units; a process with another one is not theirs


def find_units(state_dir: Path, *roles: str) -> Iterator[tuple[str, str, bool]]:
    """Yield, for each of these roles' units, how it is, what to do ("" if nothing), and whether it fails.

    There are none where systemd does not run, or does not answer.
    """
    for role in roles if state_dir == STATE_DIR and BOOTED.exists() else ():
        with suppress(OSError, subprocess.SubprocessError):
            unit = f"imds-bridge-{role}"
            command = ["systemctl", "show", "--property=LoadState,UnitFileState,SubState", unit]
            done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)  # noqa: S603
            shown = dict(line.split("=", 1) for line in done.stdout.splitlines())
            if shown["LoadState"] == "loaded":
                is_enabled = shown["UnitFileState"].startswith("enabled")
                yield _describe(unit, shown["SubState"], is_enabled=is_enabled)


def _describe(unit: str, state: str, *, is_enabled: bool) -> tuple[str, str, bool]:
    runs, fails = state == "running", state not in ("running", "dead")
    how = "runs" if runs else f"does not run ({state})"
    text = f"{unit} is {'' if is_enabled else 'not '}enabled and {how}"
    remedy = f"journalctl -u {unit} -n 20" if fails else f"systemctl enable --now {unit}"
    return text, "" if is_enabled and runs else remedy, fails or (is_enabled and not runs)
