"""Which start of the machine this is."""

from __future__ import annotations

from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def read_boot_id(path: Path = _BOOT_ID) -> str:
    """Return an id that is new after each start of the machine; "" where there is none, as on Windows."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
