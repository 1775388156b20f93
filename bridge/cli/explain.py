"""The command `explain`: whether an event goes to each sink, and what became of it there."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from bridge.arguments import OK, complete, json_lines, load_config, other_file, state_folder
from bridge.config.models import Config
from bridge.contract.status import ListenStatus
from bridge.formats.text import format_duration, table
from bridge.outbox import inspect
from bridge.outbox.inspect import Fate, next_try
from bridge.outbox.state_dir import StateFolder
from bridge.process.parts import filter_of, sinks_of
from bridge.runtime.text import show

_EPILOG = """\
For each sink: whether it takes the event, or which of `types`, `where` and `scope` leaves it out; and whether the
event still waits, is a dead letter, was delivered, or came before the sink. Reads the outbox and sends nothing.

examples:
  imds-bridge explain                     the newest event about a Scheduled Event
  imds-bridge explain 5f0c...             one event, by its CloudEvents id or the number of `outbox list`
  imds-bridge explain C7061BAC-...        every event about a Scheduled Event, by its EventId
"""
_DONE = "delivered (the log has the time), unless somebody dropped it"
_BEFORE = "was not for this sink as it is now: it is older than the sink, or than its types, where and scope"
_NEW = "older than this sink, or its types, where and scope, with which the process has not started yet"


def configure(command: argparse.ArgumentParser) -> None:
    """Complete the parser of `explain`."""
    complete(command, _run, "--role", "--json", epilog=_EPILOG)
    command.add_argument(
        "event", nargs="?", default="", metavar="EVENT_ID", help="which (default: the newest notice)"
    )


def _run(arguments: argparse.Namespace) -> int:
    config, folder = load_config(arguments), state_folder(arguments)
    if other := other_file(folder, config.path):
        show("{}: {}".format(*other), stream=sys.stderr)
    shown = [
        {
            "id": fate.event.id,
            "type": fate.event.type,
            "subject": fate.event.envelope.get("subject"),
            "sinks": [*_explain(fate, config, folder)],
            "auto": _auto(str(fate.event.envelope.get("correlationid", "")), config),
        }
        for fate in inspect.fates(folder, arguments.event)
    ]
    show(*(json_lines(shown) if arguments.json else [line for event in shown for line in _lines(event)]))
    return OK


def _explain(fate: Fate, config: Config, folder: StateFolder) -> Iterator[dict[str, Any]]:
    sinks = sinks_of(config)
    errors = inspect.last_errors(folder) if fate.waiting else {}
    for name in [*sinks, *sorted({*fate.waiting, *fate.dead} - {*sinks})]:
        why, state = "", ""
        if name not in sinks:
            why = "not configured"
        elif refusal := filter_of(sinks[name], folder.path.name).refusal(fate.event):
            key, text = refusal
            why = f"{key}{'' if key in sinks[name].model_fields_set else ' (the default)'}: {text}"
        if name in fate.dead:
            state = f"dead letter {fate.dead[name]}"
        elif name in fate.waiting:
            age = format_duration(max(0.0, datetime.now(UTC).timestamp() - fate.event.stored_at), exact=True)
            tries, due_at = fate.waiting[name]
            at = next_try(due_at)
            failed = f", failed {tries} time(s)" * bool(tries) + f", next try at {at}" * bool(at)
            state = f"waits for {age}{failed}: {errors.get(name, 'error not known') or 'no error'}"
        elif not why:
            has_begun, since = fate.filters.get(name, ("", 0))
            is_new = has_begun != repr(filter_of(sinks[name], folder.path.name))
            state = _NEW if is_new else _DONE if fate.event.seq > since else _BEFORE
        yield {"sink": name, "takes": not why, "why": why, "state": state}


def _auto(event_id: str, config: Config) -> str:
    """Return what the listener's auto rules make of an event, "" if it does not know it."""
    status = StateFolder(config.state_dir / "listen").read_status()
    views = (status.flow.auto or ()) if status and isinstance(status.flow, ListenStatus) else ()
    return next((one.Why or "" for one in views if (one.EventId or "").lower() == event_id.lower()), "")


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
    auto = [f"auto rules of the listener: {event['auto']}"] if event["auto"] else []
    return [heading, *auto, *table(("SINK", "TAKES IT", "WHY, AND WHERE IT IS"), rows), ""]
