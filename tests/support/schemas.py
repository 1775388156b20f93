"""What the tests of the contract share: validators, and real output of the real processes as examples.

`python -m tests.support.schemas` writes the examples in `schemas/examples/` that are missing or no longer right.
"""

from __future__ import annotations

import json
import re
import socket
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from hashlib import sha256
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import uuid5

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from bridge.approvals.command import COMMAND_APPROVE, parse_command
from bridge.cli.main import main
from bridge.contract.schemas import CLOUDEVENT, NAMES, file_name, schema
from bridge.contract.types import EVENT_NAMES, TYPE_PREFIX
from bridge.events.builder import END_STATUS, NAMESPACE
from bridge.imds.diff import Change
from bridge.imds.document import ScheduledEvent
from bridge.lab.imds import EVENTS_PATH
from tests.support.bus import FLEET, Sender, bus_config, message
from tests.support.diff import faults_of
from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox
from tests.support.paths import ROOT
from tests.support.process import LIMIT_SECONDS, Forward, toml, wait_until
from tests.support.servicebus import ServiceBusLab

SCHEMAS = ROOT / "schemas"
EXAMPLES = SCHEMAS / "examples"
SESSION = "{resource_group}.{vm}"
MALFORMED = 12  # two more than have receipts of their own within a minute

Envelope = dict[str, Any]

BY_NAME: dict[str, dict[str, Any]] = {name: json.loads(schema(name)) for name in NAMES}
VALIDATORS = {
    name: Draft202012Validator(one, format_checker=Draft202012Validator.FORMAT_CHECKER)
    for name, one in BY_NAME.items()
}


def name_of(envelope: Envelope) -> str:
    """Return the type without prefix and version."""
    return str(envelope["type"]).removeprefix(TYPE_PREFIX).removesuffix(".v1")


def faults(envelope: Envelope) -> list[str]:
    """Return what is wrong with an event by the rules of CloudEvents and by the schemas of its data and of it all."""
    data = VALIDATORS[name_of(envelope)].iter_errors(envelope["data"])
    whole = best_match(VALIDATORS[CLOUDEVENT].iter_errors(envelope))
    return [
        *faults_of(envelope),
        *(f"data{error.json_path[1:]}: {error.message}" for error in data),
        *([f"{whole.json_path}: {whole.message}"] if whole else []),
    ]


def paths(value: Any, at: str = "") -> set[str]:
    """Name every property of an event, at any depth."""
    if isinstance(value, dict):
        return {at} | {path for name, one in value.items() for path in paths(one, f"{at}/{name}")}
    if isinstance(value, list):
        return {at} | {path for one in value for path in paths(one, f"{at}/*")}
    return {at}


def record(folder: Path) -> list[Envelope]:
    """Run the real processes on the lab until each has published every type of event; return all events."""
    with (
        _imds() as watched,
        _imds() as approved,
        ServiceBusLab(bus_config()) as bus,
        Inbox() as inbox,
        ThreadPoolExecutor() as beside,
    ):
        # it fails once, so that the VM is out of work
        recover = ["/bin/sh", "-c", f"test -e {folder}/failed || ! touch {folder}/failed"]
        approvals = {
            "connection_string": bus.connection_string,
            "queue": FLEET,
            "session": SESSION,
            "policy": {"allow": [{}], "deny": [{"event_type": ["Terminate"]}]},
            "auto": [{"event_type": ["Preempt"], "run": ["/bin/true"], "recover": recover, "group": True}],
        }

        def given(imds: ImdsLab) -> dict[str, Any]:
            asked = {"endpoint": imds.url("web-0"), "poll_seconds": 0.2, "api_version": "2024-07-09"}
            return {"imds": asked, "stop_seconds": LIMIT_SECONDS, "approvals": approvals}

        watching = beside.submit(_watched, Forward(folder / "forward", given(watched)), watched)
        receipts = _approved(Forward(folder / "listen", given(approved), role="listen"), approved, bus)
        events = [*watching.result(), *receipts]
        config = folder / "check.toml"
        sinks = {"ops": {"kind": "webhook", "url": inbox.url}}
        config.write_text(
            toml({"state_dir": folder / "check", "imds": given(watched)["imds"], "sinks": sinks})
        )
        _command("check", "--send", "--config", config)
        return events + inbox.events()


def _imds() -> ImdsLab:
    return ImdsLab(vms=("web-0", "web-1"), scale_set="", rate_limit=None)


def examples(events: list[Envelope]) -> dict[str, Envelope]:
    """Choose one event of each type: the first that is not about nothing."""
    found: dict[str, Envelope] = {}
    for envelope in events:
        is_empty = envelope["data"].get("CloudEventIds") == [] or envelope["data"].get("EventId", "") is None
        is_empty |= envelope["data"].get("EndReason") == "Advisory"
        if not is_empty:
            found.setdefault(name_of(envelope), envelope)
    return {name: found[name] for name in EVENT_NAMES}


def id_of(envelope: Envelope, command: Envelope) -> str:
    """Return the id that an event gets from its content.

    Args:
        envelope: an event that was seen for the first time.
        command: sent like the commands that the receipts answer; its own id is any.
    """
    name, data = name_of(envelope), envelope["data"]
    family, _, kind = name.partition(".")
    if family == "scheduledevent":
        properties = list(data)
        raw = {key: data[key] for key in properties[: properties.index("PreviousStatus")]}
        if kind in END_STATUS:
            raw["EventStatus"] = data["PreviousStatus"]
        return _uuid5(f"{Change(kind=kind, event=ScheduledEvent(raw=raw)).fingerprint}:0")  # type: ignore[arg-type]
    if family == "approval" and "causationid" in envelope:
        changed = {"id": envelope["causationid"], "data": {**command["data"], "EventIds": [data["EventId"]]}}
        key = parse_command(json.dumps({**command, **changed}).encode(), message_id="").key
        return _uuid5(f"{key}:{data['EventId'].lower()}:{kind}")
    if name == "bridge.test":
        return _uuid5(f"{envelope['source']}:test:{envelope['time']}")
    if "reporterseq" not in envelope or name == "approval.prepared":  # of which the id stands for a stay
        return str(envelope["id"])
    content = json.dumps(
        [name, envelope["time"], {k: v for k, v in data.items() if k != "Vm"}], sort_keys=True
    )
    place = f"{data['Vm']['VmId']}:{envelope['reporterepoch']}:{int(envelope['reporterseq'])}"
    return _uuid5(f"{place}:{sha256(content.encode()).hexdigest()}")


def _uuid5(name: str) -> str:
    return str(uuid5(NAMESPACE, name))


def _watched(forward: Forward, imds: ImdsLab) -> list[Envelope]:
    """Let the forwarder see a life of every kind, an outage, and a restart."""
    with forward:
        _wait(forward, "document.changed")
        first = _schedule(imds, "Reboot")
        _wait(forward, "scheduledevent.scheduled")
        imds.update(first, notice_seconds=1200)
        _wait(forward, "scheduledevent.updated")
        imds.start(first)
        _wait(forward, "scheduledevent.started")
        imds.complete(first)
        _wait(forward, "scheduledevent.completed")
        advice = _schedule(imds, "SpotRebalanceRecommendation", event_status="Advisory")
        _wait(forward, "scheduledevent.advised")
        imds.complete(advice)
        _wait(forward, "scheduledevent.ended")
        while not _printed(forward, "scheduledevent.canceled"):  # on a slow machine, a watch may have a gap
            with _seen_scheduled(forward):
                second = _schedule(imds, "Freeze")
            ends = len(_printed(forward, "scheduledevent.canceled", "scheduledevent.ended"))
            imds.cancel(second)
            _wait(forward, "scheduledevent.canceled", "scheduledevent.ended", more_than=ends)
        imds.fault(500, count=None)
        _wait(forward, "imds.unreachable")
        imds.clear_faults()
        _wait(forward, "imds.recovered")
        with _seen_scheduled(forward):
            third = _schedule(imds, "Redeploy")
        assert forward.stop() == 0, forward
    imds.cancel(third)
    ends = len(_printed(forward, "scheduledevent.ended"))
    with forward:
        _wait(forward, "scheduledevent.ended", more_than=ends)
        assert forward.stop() == 0, forward
    (forward.state / "outbox.db").unlink()
    with forward:
        _wait(forward, "bridge.loss")
        assert forward.stop() == 0, forward
    return _printed(forward)


def _approved(listen: Forward, imds: ImdsLab, bus: ServiceBusLab) -> list[Envelope]:
    """Let the listener accept, refuse and fail; return its receipts, and the command as `approve` sends it."""
    _approve(listen, _schedule(imds, "Reboot"))
    command = json.loads(bus.entity(FLEET).messages[0].body)
    with listen, Sender(bus, FLEET) as sender:
        _wait(listen, "approval.accepted")
        _approve(listen, _schedule(imds, "Terminate"))
        _wait(listen, "approval.rejected")
        imds.fault(400, method="POST", path=EVENTS_PATH)
        _approve(listen, _schedule(imds, "Reboot"))
        _wait(listen, "approval.failed")
        eviction = _schedule(imds, "Preempt")
        _wait(listen, "approval.prepared")
        imds.cancel(eviction)
        nonsense = [
            message(f"no command {number}", session_id="lab.web-0", message_id=f"order-{number}")
            for number in range(MALFORMED)
        ]
        sender.send(*nonsense)
        wait_until(lambda: bus.entity(FLEET).counts.dead_letters == MALFORMED, describe=lambda: listen)
        _wait(listen, "approval.recovered")
        assert listen.stop() == 0, listen
    return [command, *_printed(listen)]


def _schedule(imds: ImdsLab, event_type: str, **more: Any) -> str:
    description = "Host server is undergoing maintenance."
    names = ["web-0"] if event_type == "Terminate" else ["web-0", "web-1"]
    return imds.schedule(event_type=event_type, resources=names, description=description, **more)


def _approve(listen: Forward, event_id: str) -> None:
    options = ("--vm", "web-0", "--resource-group", "lab", "--reason", "drained", "--config", listen.config)
    with patch.dict("os.environ", {"LOGNAME": "operator"}):
        _command("approve", event_id, *options)


def _command(*arguments: str | Path) -> None:
    """Run a command in this process."""
    printed = StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        code = main([str(argument) for argument in arguments])
    assert code == 0, printed.getvalue()


def _printed(process: Forward, *names: str) -> list[Envelope]:
    """Return what it printed so far, of these types or of all."""
    return [envelope for envelope in process.printed() if not names or name_of(envelope) in names]


def _wait(process: Forward, *names: str, more_than: int = 0) -> None:
    wait_until(lambda: len(_printed(process, *names)) > more_than, describe=lambda: process)


@contextmanager
def _seen_scheduled(forward: Forward) -> Iterator[None]:
    before = len(_printed(forward, "scheduledevent.scheduled"))
    yield
    _wait(forward, "scheduledevent.scheduled", more_than=before)


def kept(file: Path, envelope: Envelope) -> Envelope:
    """Return the example in a file, so that a change of one type changes no other's, or else what is published now.

    Args:
        file: it may be missing, have other properties than what is published now, or not match the schemas.
        envelope: what is published now.
    """
    if file.exists():
        known: Envelope = json.loads(file.read_text())
        if paths(known) == paths(envelope) and not faults(known):
            return known
    return envelope


def _write() -> None:
    """Write the examples; the name of this machine and the address of the lab are replaced, and ids that follow."""
    EXAMPLES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(examples(record(Path(folder))))
    text = re.sub(rf'(?<=[@:"]){re.escape(socket.gethostname())}(?=")', "ops-1", text)
    new = json.loads(re.sub(r"http://127\.0\.0\.1:\d+", "http://169.254.169.254", text))
    found = {name: kept(EXAMPLES / file_name(name), envelope) for name, envelope in new.items()}
    for name, envelope in found.items():
        envelope["id"] = id_of(envelope, found[COMMAND_APPROVE])
        (EXAMPLES / file_name(name)).write_text(json.dumps(envelope, indent=2) + "\n")


if __name__ == "__main__":
    _write()
