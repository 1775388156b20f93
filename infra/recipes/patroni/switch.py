#!/usr/bin/python3
"""Keep a member of Patroni from leading, or let it lead again: switch.py run|recover NAME URL."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

verb, name, url = sys.argv[1:]
secret = Path(os.environ["CREDENTIALS_DIRECTORY"], "secrets_patroni").read_bytes().strip()


def call(path: str, body: dict[str, str] | None = None, seconds: float = 10) -> str:
    head = {"Authorization": f"Basic {base64.b64encode(secret).decode()}"}
    request = urllib.request.Request(url + path, json.dumps(body).encode() if body else None, head)
    with urllib.request.urlopen(request, timeout=seconds) as answer:
        return str(answer.read().decode())


def wait_until(is_true: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    for _ in range(60):
        members: dict[str, dict[str, Any]] = {
            one["name"]: one for one in json.loads(call("/cluster"))["members"]
        }
        if (member := members.get(name, {})) and is_true(member):
            return member
        time.sleep(1)
    sys.exit(f"not within a minute: {name} is {member or 'no member'}")


def tag(state: str) -> None:
    subprocess.run(["systemctl", "start", f"patroni-nofailover@{state}.service"], timeout=30, check=True)


try:
    if verb == "run":
        tag("on")
        if "leader" in wait_until(lambda member: member.get("tags", {}).get("nofailover"))["role"]:
            print(call("/switchover", {"leader": name}, 60))
        print(wait_until(lambda member: "leader" not in member["role"]))
    else:
        tag("off")
        print(wait_until(lambda member: member["state"] in ("running", "streaming")))
except (OSError, subprocess.SubprocessError) as error:
    sys.exit(f"{url}: {error} {error.read(300).decode() if hasattr(error, 'read') else ''}")
