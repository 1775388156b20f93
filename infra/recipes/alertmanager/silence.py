#!/usr/bin/python3
"""Silence a VM's alerts while an event of it lasts: silence.py URL MATCHER; that is NAME=VALUE or NAME=~REGEX."""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.error import HTTPError

MARGIN_SECONDS, CAP_SECONDS = 900, 7200  # the cap counts where the duration is unknown, too
LATER = 75  # the sink tries again; after any other exit code the event becomes a dead letter
url, matcher = sys.argv[1:]
label, operator, value = re.fullmatch(r"(\w+)(=~|=)(.+)", matcher).groups()  # type: ignore[union-attr]
event = json.load(sys.stdin)["data"]
ours = {"createdBy": f"imds-bridge {matcher}", "comment": f"{event['EventType']} {event['EventId']}"}


def call(method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    data = json.dumps(body).encode() if body else None
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/api/v2/{path}", data, head, method=method)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.loads(answer.read() or "null")


def end(now: datetime) -> datetime:
    """Return the end of the event and a margin; what is unknown counts as long."""
    text, known = event["NotBeforeUtc"], event["DurationInSeconds"]
    start = datetime.fromisoformat(text.replace("Z", "+00:00")) if text else now
    lasts = min(known, CAP_SECONDS) if isinstance(known, int) and known >= 0 else CAP_SECONDS
    return max(now, start) + timedelta(seconds=lasts + MARGIN_SECONDS)


try:
    silences = [one for one in call("GET", "silences") if one["status"]["state"] != "expired"]
    found = [one for one in silences if ours.items() <= one.items()]
    if event["EventStatus"] in ("Scheduled", "Started"):
        now = datetime.now(timezone.utc)
        matchers = [
            {"name": label, "value": value, "isRegex": operator == "=~", "isEqual": True},
            {"name": "alertname", "value": "ImdsBridge.*", "isRegex": True, "isEqual": False},
        ]
        same = {key: one[key] for one in found for key in ("id", "startsAt")} or {"startsAt": now.isoformat()}
        until = end(now).isoformat()
        print(call("POST", "silences", {**ours, **same, "endsAt": until, "matchers": matchers}), until)
    else:
        for one in found:
            call("DELETE", f"silence/{one['id']}")
            print("expired", one["id"])
except OSError as error:
    print(f"{url}: {error}", error.read(300).decode() if isinstance(error, HTTPError) else "")
    sys.exit(1 if isinstance(error, HTTPError) and error.code < 500 else LATER)
