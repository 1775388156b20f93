"""Check the health of this container's process: exit with 0 if it is healthy, else with 1 and the reason.

    python health.py            it runs, and every loop makes progress
    python health.py --ready    and IMDS, or the bus, answers, and the state can be written

It asks the port of `[metrics]`, or the console's own, if that is on and answers; otherwise it reads the status file.
Role and configuration are read from the command line of process 1; --role sets it if that is another process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tomllib
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from bridge.runtime.text import show

ROLES = ("forward", "listen", "relay", "console")
STATE_DIR = "/var/lib/imds-bridge"
CONSOLE_LISTEN = "127.0.0.1:8080"
# The status is written every five seconds.
STALE_SECONDS = 60.0
CONFIG = Path("/etc/imds-bridge/config.toml")
ASK_SECONDS = 3.0


def main() -> int:
    """Check once; return the exit code."""
    parser = argparse.ArgumentParser(description="Check the health of this container's process.")
    parser.add_argument("--role", choices=ROLES, default=None)
    parser.add_argument("--ready", action="store_true", help="also check what /readyz does")
    arguments = parser.parse_args()
    words = Path("/proc/1/cmdline").read_text(encoding="utf-8").split("\0")
    role = arguments.role or next((word for word in words if word in ROLES), ROLES[0])
    reason = _ask_port(role, read_listen(words, role), "/readyz" if arguments.ready else "/livez")
    if reason is None:
        reason = _read_files(role, ready=arguments.ready, is_named=role in words)
    show(reason or "healthy")
    return 1 if reason else 0


def _ask_port(role: str, listen: str, path: str) -> str | None:
    """Return why the process is not healthy, "" if it is, None if the port is off or does not answer."""
    with contextlib.suppress(OSError, HTTPException, ValueError, KeyError, TypeError):
        host, _, port = listen.rpartition(":")
        connection = HTTPConnection(host.strip("[]"), int(port), timeout=ASK_SECONDS)
        with contextlib.closing(connection):
            connection.request("GET", path)
            answer = json.loads(connection.getresponse().read())
            # Another process may have the port.
            if answer["role"] == role:
                # The console, which others can ask, gives no reasons.
                return "" if answer["ok"] else "; ".join(answer.get("reasons", [f"{path} of {role} fails"]))
    return None


def read_listen(words: list[str], role: str) -> str:
    """Return the address of the port, "" if it is off or the configuration cannot be read.

    Args:
        words: the command line of the process.
        role: of the process.
    """
    section, default = ("console", CONSOLE_LISTEN) if role == "console" else ("metrics", "")
    if (variable := f"IMDS_BRIDGE__{section.upper()}__LISTEN") in os.environ:
        return os.environ[variable]
    path = Path(words[words.index("--config") + 1]) if "--config" in words else CONFIG
    with contextlib.suppress(OSError, ValueError, AttributeError):
        settings = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        return str(settings.get(section, {}).get("listen", default))
    return default


def _read_files(role: str, *, ready: bool, is_named: bool = False) -> str:
    """Return why the process is not healthy by the files in its state folder, "" if it is.

    Args:
        role: of the process.
        ready: whether it also has to be ready.
        is_named: whether the command line of process 1 names the role.
    """
    # Where the port answers, a probe need not load them.
    from bridge.outbox.state_dir import StateFolder  # noqa: PLC0415
    from bridge.process.status import age_of, find_unready  # noqa: PLC0415

    folder = StateFolder(Path(os.environ.get("IMDS_BRIDGE__STATE_DIR", STATE_DIR)) / role)
    status, now = folder.read_status(), datetime.now(UTC)
    if status is None or status.running is False or folder.owner() is None:
        if is_named:  # it runs: a restart would lose the events that it holds in memory
            return f"{role} could not write its status to {folder.path} yet" if ready else ""
        return f"{role} does not run"
    # While the disk cannot be written, events are in memory only: a restart would lose them.
    if (age_of(status.written_at, now) or 0) > STALE_SECONDS and os.access(folder.path, os.W_OK):
        return f"{role} has written no status since {status.written_at}"
    return "; ".join(find_unready(status, now)) if ready else ""


if __name__ == "__main__":
    sys.exit(main())
