"""Control a running lab from another terminal, over its control API."""

from __future__ import annotations

import argparse
import http.client
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from bridge.lab.httpd import LabError
from bridge.lab.rendering import EVENT_TYPES
from bridge.runtime.text import show

TIMEOUT_SECONDS = 10.0
# The minimum notice of each type (Microsoft Learn, "Scheduled Events"). The user sets that of Terminate, from 300 up.
MINIMUM_NOTICE_SECONDS = {
    "Freeze": 900.0,
    "Reboot": 900.0,
    "Redeploy": 600.0,
    "Preempt": 30.0,
    "Terminate": 300.0,
}
DEFAULT_NOTICE_SECONDS = 900.0


def schedule(args: argparse.Namespace) -> None:
    """Add an event and print its EventId."""
    if args.event_type not in EVENT_TYPES:
        expected = ", ".join(EVENT_TYPES)
        show(f"note: --type {args.event_type} is not one of {expected}", stream=sys.stderr)
    answer = _call(args.control, "POST", "/schedule", **_event(args))
    show(answer["event_id"])


def _event(args: argparse.Namespace) -> dict[str, Any]:
    notice = MINIMUM_NOTICE_SECONDS.get(args.event_type, DEFAULT_NOTICE_SECONDS)
    event = {
        "event_type": args.event_type,
        "resources": _resources(args),
        "notice_seconds": notice if args.notice is None else args.notice,
        "event_source": args.source,
        "event_status": args.status,
        "duration_seconds": args.duration,
        "description": args.description,
        "hold": args.hold,
    }
    if args.impact is not None:
        event |= {"completes": True, "impact_seconds": args.impact}
    return event


def _resources(args: argparse.Namespace) -> list[str]:
    if args.no_vm:
        return []
    known = list(_call(args.control, "GET", "/state")["vms"])
    unknown = [name for name in args.resources if name not in known]
    if unknown:
        raise LabError(
            f"--vm given: {', '.join(unknown)}; expected: {', '.join(known)}, the VMs of this lab "
            "(--other-vm names others)"
        )
    return [*args.resources, *args.other_vms] or known


def act_on_event(args: argparse.Namespace) -> None:
    """Start, cancel, complete or release an event."""
    _call(args.control, "POST", f"/{args.lab_command}", event_id=args.event_id)


def fault(args: argparse.Namespace) -> None:
    """Add a fault, or remove all."""
    if args.kind == "clear":
        _call(args.control, "POST", "/clear-faults")
        return
    _call(
        args.control,
        "POST",
        "/fault",
        kind=args.kind,
        count=args.count or None,
        seconds=args.seconds,
        retry_after=args.retry_after,
    )


def state(args: argparse.Namespace) -> None:
    """Print the lab's state as JSON."""
    show(*json.dumps(_call(args.control, "GET", "/state"), indent=2).split("\n"))


COMMANDS: Mapping[str, Callable[[argparse.Namespace], None]] = {
    "schedule": schedule,
    "start": act_on_event,
    "cancel": act_on_event,
    "complete": act_on_event,
    "release": act_on_event,
    "fault": fault,
    "state": state,
}


def _call(control_url: str, method: str, path: str, **values: Any) -> Any:
    """Return the answer of the control API; raise LabError if it refuses or does not answer."""
    host, port = _host_and_port(control_url)
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request(method, path, body=json.dumps(values) if method == "POST" else None)
        response = connection.getresponse()
        answer = json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise LabError(
            f"--control given: {control_url}, where no lab answers ({error}); "
            "expected: the control address of a running lab; start one with: imds-bridge lab"
        ) from error
    finally:
        connection.close()
    if not isinstance(answer, dict) or response.status != http.client.OK:
        reason = answer.get("error") if isinstance(answer, dict) else None
        raise LabError(
            reason or f"--control given: {control_url}, which answered {response.status}; expected: a lab"
        )
    return answer


def _host_and_port(control_url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(control_url)
        if parts.scheme == "http" and parts.hostname:
            return parts.hostname, parts.port or 80
    except ValueError:
        pass  # the port is not a number, or an IPv6 address lacks its bracket
    raise LabError(f"--control given: {control_url!r}; expected: a URL such as http://127.0.0.1:8810")
