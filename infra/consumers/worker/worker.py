#!/usr/bin/env python3
"""Prepare this VM for Azure's scheduled events, approve them, and recover afterwards, over imds-bridge's bus."""

import argparse
import base64
import contextlib
import hmac
import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.exceptions import MessageAlreadySettled, MessageLockLostError

EXAMPLE = """example:
  worker.py --namespace contoso.servicebus.windows.net --topic scheduled-events --subscription web-0 --vm web-0 \\
      --approvals approvals --prepare "/usr/local/bin/drain --all" --recover /usr/local/bin/undrain
In place of --namespace: SERVICEBUS_CONNECTION_STRING. If SIGNING_SECRET is set, commands are signed with it, and
receipts that are not are ignored.
Exit codes: 0 after SIGTERM, 2 if an option, a variable or the state file is invalid."""
VARIABLES = {"EVENT_ID": "EventId", "EVENT_TYPE": "EventType", "EVENT_STATUS": "EventStatus"}
VARIABLES |= {
    "EVENT_SOURCE": "EventSource",
    "NOT_BEFORE": "NotBeforeUtc",
    "DURATION_SECONDS": "DurationInSeconds",
}
WORK = ("announced", "prepared", "ended")  # the phases with work to do; the others are waiting and over
PAUSE_SECONDS = RENEW_SECONDS = 5
STALE_SECONDS = 86_400  # after its NotBefore, an event without news is not believed to be there any more
TOLERANCE_SECONDS = 300
UNKNOWN_TYPE = "an unknown type"
log = logging.getLogger("worker")


class Worker:
    """The VM's events, the commands that run for them, and messages whose work is not recorded yet."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.stopping, self.renewed_at = options, False, time.monotonic()
        # by event key: process, phase, start, story
        self.jobs: dict[str, tuple[subprocess.Popen[bytes], str, float, str]] = {}
        self.pending: list[tuple[str, Any]] = []  # event key, message
        self.saved = options.state.read_text() if options.state.exists() else "{}"
        self.events: dict[str, dict[str, Any]] = json.loads(self.saved)

    def run(self) -> None:
        """Work until SIGTERM; after an error of the bus, connect again."""
        entity = (self.options.topic, self.options.subscription)
        while not self.stopping:
            try:
                with connect(self.options) as bus, bus.get_subscription_receiver(*entity) as receiver:
                    while not self.stopping:
                        wait_seconds = 0.1 if self.jobs else 1
                        for message in receiver.receive_messages(20, max_wait_time=wait_seconds):
                            self.pending.append((self.read(message), message))
                        self.work()
                        self.settle(receiver)
            except Exception as error:  # noqa: BLE001 - the SDK raises errors of many families
                log.warning("bus error, retry in %d s: %s: %s", PAUSE_SECONDS, type(error).__name__, error)
                self.pending.clear()  # they will be delivered again
                self.work()
                time.sleep(0 if self.stopping else PAUSE_SECONDS)
        for process, *_ in self.jobs.values():  # the next start runs them again
            end(process, signal.SIGTERM)

    def read(self, message: Any) -> str:
        """Process a message; return the key of its event."""
        try:
            event = json.loads(b"".join(message.body))
            family, kind = event["type"].removeprefix("io.imdsbridge.").split(".")[:2]
            key = str(event["data"].get("EventId")).lower()
            if family == "scheduledevent":
                self.note(key, kind, event["data"], event["time"], event["id"])
            elif self.options.secret and family == "approval" and not is_signed(self.options.secret, message):
                log.warning(
                    "message %s: a receipt without the listener's signature is ignored", message.message_id
                )
            elif family == "approval" and key in self.events:
                log.info("%s: approval %s: %s", key, kind, event["data"].get("Reason", "-"))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            log.warning("message %s is invalid and ignored: %r", message.message_id, error)
            return ""
        return key

    def note(self, key: str, kind: str, data: dict[str, Any], at: str, copy: str) -> None:
        """Update what is known of an event."""
        affected, event_type = affects(data, self.options.vm), data.get("EventType")
        if not (event_type and isinstance(event_type, str)):
            event_type = UNKNOWN_TYPE
        is_removed = affected is False  # where it is unknown, the VM may be among them
        is_end = kind in ("completed", "canceled", "ended") or is_removed
        known = self.events.get(key, {"phase": "announced", "time": at})
        is_wanted = event_type.lower() in (*self.options.types, UNKNOWN_TYPE)
        if key not in self.events and (is_removed or not is_wanted):
            return
        ids = known.get("ids", [])
        is_over = known["phase"] in ("ended", "over")
        latest = known.get("time", "~")  # "~": an event that was over in a state of an earlier version
        if copy in ids or at < (known.get("came_back", "") if is_end else latest):
            return  # a copy, old news, or the end of the story before
        if is_over and is_end:
            known["time"] = max(at, latest)
            return
        if is_over:
            known = {"phase": "announced", "time": at, "came_back": at, "ids": ids}  # a new story
        is_moved = seconds(data["NotBeforeUtc"]) != seconds(known.get("NotBeforeUtc"))
        log.info("%s: %s of %s: %s", key, event_type, ", ".join(names(data)) or "unknown VMs", kind)
        event = self.events[key] = (
            known | {"Resources": None} | data | {"time": max(at, latest), "ids": [*ids, copy]}
        )
        if is_end:
            event["phase"] = "ended"
            if others := self.preparations(key):
                log.info("%s: no recovery yet: the VM stays prepared for %s", key, ", ".join(others))
        elif data.get("EventStatus") == "Started":
            event["phase"] = "waiting"  # too late to prepare or to approve; a running command may continue
        elif event["phase"] == "waiting" and is_moved:
            event["phase"] = "prepared" if "drained" in event else "announced"

    def work(self) -> None:
        """Take the next step for each event; save the state before and after."""
        self.save()
        for key, event in self.events.items():
            if key in self.jobs:
                self.check(key, event)
            if key in self.jobs:
                continue
            if event["phase"] == "prepared" and self.approve(key, event):
                event["phase"] = "waiting"
            elif event["phase"] in ("announced", "ended") and not self.must_wait(key, event["phase"]):
                self.start(key, event, event["phase"])
        self.save()

    def preparations(self, key: str) -> list[str]:
        """Return the other events that the VM is prepared for, or is being prepared for."""
        preparing = {other for other, (_, phase, *_) in self.jobs.items() if phase == "announced"}
        return [
            other
            for other, event in self.events.items()
            if other != key
            and event["phase"] not in ("ended", "over")
            and time.time() < last_instant(event) + STALE_SECONDS
            and (other in preparing or event["phase"] == "announced" or "drained" in event)
        ]

    def must_wait(self, key: str, phase: str) -> bool:
        """Return whether a command must not start yet: no two recoveries at once, none while the VM is prepared."""
        is_recovering = any(running == "ended" for _, running, *_ in self.jobs.values())
        return is_recovering or (phase == "ended" and bool(self.preparations(key)))

    def start(self, key: str, event: dict[str, Any], phase: str) -> None:
        """Start the command of a phase, if there is time left for it."""
        if self.deadline(event, phase, time.time()) <= time.time():
            log.error("%s: no time is left to prepare; not approved", key)
            event["phase"] = "waiting"
            return
        command = self.options.prepare if phase == "announced" else self.options.recover
        variables = {name: plain(event.get(source)) for name, source in VARIABLES.items()}
        variables["RESOURCES"] = plain(",".join(names(event)))
        log.info("%s: running %s", key, command)
        process = subprocess.Popen(  # noqa: S603 - the operator's command, run without a shell
            shlex.split(command), env=os.environ | variables, stdin=subprocess.DEVNULL, start_new_session=True
        )
        self.jobs[key] = (process, phase, time.time(), event.get("came_back", ""))

    def deadline(self, event: dict[str, Any], phase: str, started: float) -> float:
        """Return when a command must be done: after its time limit, and for --prepare before the event starts."""
        limit: float = started + self.options.timeout_seconds
        not_before = seconds(event["NotBeforeUtc"]) if phase == "announced" else None
        return min(limit, not_before - self.options.margin_seconds) if not_before else limit

    def check(self, key: str, event: dict[str, Any]) -> None:
        """Stop a command that is late or no longer needed, or process its exit code."""
        process, phase, started, story = self.jobs[key]
        code, is_of_before = process.poll(), story != event.get("came_back", "")
        if code is None:
            late_seconds = time.time() - self.deadline(event, phase, started)
            is_needed = not self.preparations(key) if phase == "ended" else event["phase"] != "ended"
            if late_seconds >= 0 or is_of_before or not is_needed:
                is_too_late = late_seconds > self.options.margin_seconds
                end(process, signal.SIGKILL if is_too_late else signal.SIGTERM)
            return
        del self.jobs[key]
        log.log(logging.ERROR if code else logging.INFO, "%s: the command ended with exit code %d", key, code)
        if is_of_before or (phase == "ended" and code and self.preparations(key)):
            return  # what was stopped for an event runs again after it
        if phase == "ended":
            kept = {"time": event["time"], "ids": event.get("ids", []), "phase": "over"}
            event.clear()
            event |= kept  # even after a failure: it runs only once
            return
        if code == 0:
            event["drained"] = True
        if event["phase"] == "announced":
            event["phase"] = "waiting" if code else "prepared"

    def approve(self, key: str, event: dict[str, Any]) -> bool:
        """Send the approve command, always with the same Id; return False to try again later."""
        others = [name for name in names(event) if fold(name) != fold(self.options.vm)]
        left_seconds = (seconds(event["NotBeforeUtc"]) or time.time() + 600) - time.time()
        obstacle = (
            (not self.options.approvals and "--approvals is not set")
            or (not event["ApprovalSession"] and "ApprovalSession is null")
            or (not has_all_names(event) and "it does not say which VMs it would release")
            or (others and not self.options.group and f"it would also release {', '.join(others)}")
            or (left_seconds <= 0 and "it is too late")
        )
        if obstacle:
            log.warning("%s: prepared, but not approved: %s", key, obstacle)
            return True
        self.save()  # the event is prepared, also if sending fails
        story = f"{key}:{event['NotBeforeUtc']}{event.get('came_back', '')}"
        name = str(uuid.uuid5(uuid.NAMESPACE_URL, f"urn:imds-worker:{story}"))
        expires = datetime.fromtimestamp(time.time() + left_seconds, UTC).isoformat()
        body = json.dumps(
            {"EventId": event["EventId"], "Id": name, "Reason": "prepared", "ExpiresAt": expires}
        )
        headers = sign(self.options.secret, name, body) if self.options.secret else {}
        session = event["ApprovalSession"]
        message = ServiceBusMessage(body, message_id=name, session_id=session, application_properties=headers)
        try:
            with connect(self.options) as bus, bus.get_queue_sender(self.options.approvals) as sender:
                sender.send_messages(message, timeout=15)
        except Exception as error:  # noqa: BLE001 - any error is retried until it is too late
            log.warning("%s: not approved yet: %s: %s", key, type(error).__name__, error)
            return False
        log.info("%s: approve command %s sent", key, name)
        return True

    def save(self) -> None:
        """Write the state atomically."""
        text, new = json.dumps(self.events), self.options.state.with_suffix(".new")
        if text == self.saved:
            return
        with new.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.options.state)
        self.saved = text

    def settle(self, receiver: Any) -> None:
        """Complete the messages whose work is recorded; renew the locks of the others."""
        pending, self.pending = self.pending, []
        if is_due := time.monotonic() - self.renewed_at >= RENEW_SECONDS:
            self.renewed_at = time.monotonic()
        for key, message in pending:
            with contextlib.suppress(
                MessageLockLostError, MessageAlreadySettled
            ):  # it will be delivered again
                phase = self.events.get(key, {}).get("phase")
                if phase not in WORK or (phase == "ended" and self.preparations(key)):
                    receiver.complete_message(message)
                    continue
                if is_due:
                    receiver.renew_message_lock(message, timeout=10)
                self.pending.append((key, message))


def end(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal a command and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def fold(name: str) -> str:
    """Normalise a VM's name for comparison."""
    return name.removeprefix("_").casefold()


def names(event: dict[str, Any]) -> list[str]:
    """Return the names of an event's VMs: IMDS's property may be missing, or have any value."""
    given = event.get("Resources")
    listed = [given] if isinstance(given, str) else given
    return [one for one in listed if one and isinstance(one, str)] if isinstance(listed, list) else []


def has_all_names(event: dict[str, Any]) -> bool:
    """Return whether `names` are all VMs of an event."""
    found = names(event)
    return bool(found) and event["Resources"] in (found, found[0])


def affects(event: dict[str, Any], vm: str) -> bool | None:
    """Return whether an event names a VM; None if that is unknown."""
    is_named = fold(vm) in map(fold, names(event))
    return True if is_named else False if has_all_names(event) else None


def plain(value: Any) -> str:
    """Convert a value to text that any environment variable can hold."""
    return str("" if value is None else value).replace("\0", "").encode("ascii", "replace").decode()


def seconds(instant: str | None) -> float | None:
    """Return an instant as seconds since 1970."""
    return datetime.fromisoformat(instant).timestamp() if instant else None


def last_instant(event: dict[str, Any]) -> float:
    """Return when an event starts at the earliest, or when it last changed, whichever is later."""
    return max(seconds(event["NotBeforeUtc"]) or 0, seconds(event["time"]) or 0)


def sign(secret: str, name: str, body: str, at: str = "") -> dict[str | bytes, Any]:
    """Return the headers of Standard Webhooks."""
    at, key = at or str(int(time.time())), base64.b64decode(secret.removeprefix("whsec_"))
    code = base64.b64encode(hmac.digest(key, f"{name}.{at}.{body}".encode(), "sha256")).decode()
    return {"webhook-id": name, "webhook-timestamp": at, "webhook-signature": f"v1,{code}"}


def is_signed(secret: str, message: Any) -> bool:
    """Return whether a message has the signature of `sign`, made within five minutes of being sent."""
    found = message.application_properties or {}
    given = {
        name: found.get(name.encode(), b"")
        for name in ("webhook-id", "webhook-timestamp", "webhook-signature")
    }
    if not all(isinstance(value, bytes) for value in given.values()):
        return False
    name, at, offered = (value.decode() for value in given.values())
    if not at.isdecimal() or abs(int(at) - message.enqueued_time_utc.timestamp()) > TOLERANCE_SECONDS:
        return False
    code = sign(secret, name, b"".join(message.body).decode(), at)["webhook-signature"]
    return any(hmac.compare_digest(code.encode(), one.encode()) for one in offered.split())


class EscapingFormatter(logging.Formatter):
    """Shows control characters as escapes: they may come from the bus."""

    def format(self, record: logging.LogRecord) -> str:
        """Write the record on one line."""
        text = super().format(record)
        return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def connect(options: argparse.Namespace) -> ServiceBusClient:
    """Create a client, with the managed identity or a connection string."""
    if options.connection_string:
        return ServiceBusClient.from_connection_string(options.connection_string, retry_total=1)
    from azure.identity import DefaultAzureCredential  # noqa: PLC0415 - not needed with a connection string

    return ServiceBusClient(options.namespace, DefaultAzureCredential(), retry_total=1)


def read_options() -> argparse.Namespace:
    """Read the options and the secrets, and remove the secrets from the environment of the commands."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLE, formatter_class=raw)
    add = parser.add_argument
    add(
        "--namespace",
        help="NAME.servicebus.windows.net, with the managed identity (AZURE_CLIENT_ID chooses one)",
    )
    add("--topic", required=True)
    add("--subscription", required=True, help="this VM's own")
    add("--vm", required=True, help="this VM's name, as Azure knows it")
    add(
        "--prepare",
        required=True,
        metavar="COMMAND",
        help="split into words like in a shell, but run without one",
    )
    add("--recover", required=True, metavar="COMMAND", help="run once at the end of each event")
    add("--approvals", metavar="QUEUE", help="the queue for approve commands; without it nothing is approved")
    add("--group", action="store_true", help="also approve events that release other VMs besides this one")
    add("--types", default="Reboot,Redeploy,Preempt,Terminate", help="of events (default: %(default)s)")
    add("--timeout-seconds", type=float, default=600, help="limit of each command (default: %(default)s)")
    add(
        "--margin-seconds",
        type=float,
        default=5,
        help="stop --prepare this long before NotBefore (default: %(default)s)",
    )
    add(
        "--state",
        type=Path,
        default=Path("worker.json"),
        help="state file, which must survive a restart (default: %(default)s)",
    )
    options = parser.parse_args()
    options.types = options.types.lower().split(",")
    options.connection_string = os.environ.pop("SERVICEBUS_CONNECTION_STRING", "")
    options.secret = os.environ.pop("SIGNING_SECRET", "")
    if bool(options.namespace) == bool(options.connection_string):
        parser.error("give either --namespace or, in the environment, SERVICEBUS_CONNECTION_STRING")
    for command in (options.prepare, options.recover):
        if not shutil.which(shlex.split(command)[0]):
            parser.error(f"cannot run the command {command!r}")
    return options


def main() -> None:
    """Work until SIGTERM."""
    logging.basicConfig(level=logging.INFO)
    logging.getLogger().handlers[0].setFormatter(EscapingFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger("azure").setLevel(logging.CRITICAL)
    options = read_options()
    try:
        sign(options.secret, "", "")
        connect(options).close()  # checks the connection string, without connecting
        worker = Worker(options)
    except (OSError, ValueError) as error:
        print(
            f"worker: a secret, or the state file {options.state}, cannot be used: {error}", file=sys.stderr
        )
        sys.exit(2)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: setattr(worker, "stopping", True))
    worker.run()


if __name__ == "__main__":
    main()
