"""The command `explain`: whether an event goes to each sink, and what became of it there."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bridge.cli.common import OK, complete, json_lines, load_config, state_folder
from bridge.config.models import Config
from bridge.errors import UsageError
from bridge.events.envelope import read_event
from bridge.events.model import StoredEvent
from bridge.formats.text import format_duration, table
from bridge.outbox import inspect
from bridge.outbox.inspect import Fate
from bridge.runtime.text import show
from bridge.service.composition import filter_of, sinks_of

_EPILOG = """\
For each sink: whether it takes the event, or which of `types`, `where` and `scope` leaves it out; and whether the
event still waits, is a dead letter, or waits no longer. Reads the outbox and sends nothing.

examples:
  imds-bridge explain                     the newest event
  imds-bridge explain 5f0c...             one event, by its CloudEvents id or the number of `outbox list`
  imds-bridge explain C7061BAC-...        every event about a Scheduled Event, by its EventId
  imds-bridge explain event.json          a CloudEvent of a file, as if it came now
"""
_DONE = "waits no longer: delivered (the log has the time), dropped, or older than this sink"
_NEW = "older than this sink, which the process has not started with yet; with from_start it will wait then"


def configure(command: argparse.ArgumentParser) -> None:
    """Complete the parser of `explain`."""
    complete(command, _run, "--role", "--json", epilog=_EPILOG)
    command.add_argument(
        "event", nargs="?", default="", metavar="EVENT_ID | FILE", help="which event (default: the newest)"
    )


def _run(arguments: argparse.Namespace) -> int:
    config = load_config(arguments)
    shown = [
        {
            "id": fate.event.id,
            "type": fate.event.type,
            "subject": fate.event.envelope.get("subject"),
            "sinks": [*_explain(fate, config, arguments)],
        }
        for fate in _fates(arguments)
    ]
    show(*(json_lines(shown) if arguments.json else [line for event in shown for line in _lines(event)]))
    return OK


def _fates(arguments: argparse.Namespace) -> list[Fate]:
    """Return the events that are meant, the oldest first; no sink has begun with one of a file."""
    file = Path(arguments.event)
    if file.suffix != ".json" and not file.is_file():
        return inspect.fates(state_folder(arguments), arguments.event)
    try:
        body = file.read_bytes()
        known = read_event(body)
    except (OSError, ValueError) as error:
        raise UsageError(f"explain: {file}: {error}") from error
    event = StoredEvent(seq=0, id=known.id, type=known.type, stored_at=0.0, body=body)
    return [Fate(event, (), {}, ())]


def _explain(fate: Fate, config: Config, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    sinks = sinks_of(config)
    last = (state_folder(arguments).read_status() or {}).get("sinks", {}) if fate.waiting else {}
    for name in [*sinks, *sorted({*fate.waiting, *fate.dead} - {*sinks})]:
        why, state = "", ""
        if name not in sinks:
            why = "not configured"
        elif refusal := filter_of(sinks[name], arguments.role).refusal(fate.event):
            key, text = refusal
            why = f"{key}{'' if key in sinks[name].model_fields_set else ' (the default)'}: {text}"
        if name in fate.dead:
            state = f"dead letter {fate.dead[name]}"
        elif name in fate.waiting:
            age = format_duration(max(0.0, datetime.now(UTC).timestamp() - fate.event.stored_at), exact=True)
            state = f"waits for {age}: {last.get(name, {}).get('last_error') or 'no error'}"
        elif fate.event.seq and not why:
            state = _DONE if name in fate.begun else _NEW
        yield {"sink": name, "takes": not why, "why": why, "state": state}


def _lines(event: dict[str, Any]) -> list[str]:
    rows = [
        (
            one["sink"],
            "no" if one["why"] else "yes",
            "; ".join(filter(None, (one["why"], one["state"]))) or "-",
        )
        for one in event["sinks"]
    ]
    about = f" about {event['subject']}" if event["subject"] else ""
    heading = f"{event['type']}{about}, id {event['id']}"
    return [heading, *table(("SINK", "TAKES IT", "WHY, AND WHERE IT IS"), rows), ""]
