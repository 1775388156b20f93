"""Decide which events a sink takes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from bridge.config.sinks import alternatives, expression_of
from bridge.events.model import StoredEvent
from bridge.imds.document import is_among, names
from bridge.runtime.json import Json


class Filter:
    """Matches the events that a sink receives.

    Args:
        types: patterns of types, with `*` for any text.
        where: values of attributes or properties of `data`, with dots into objects; an attribute comes before a
            property of the same name. A list of values means any of them; of a list in the event, one equal element
            is enough.
        scope: "self" for events whose Resources list this VM, and for events without Resources or while the VM is
            unknown; "first" for events whose Resources list this VM first; "all".
    """

    def __init__(
        self, *, types: Sequence[str] = ("*",), where: Mapping[str, Json] | None = None, scope: str = "all"
    ) -> None:
        self._types = tuple(types)
        self._expression = re.compile("|".join(f"(?:{expression_of(pattern)})" for pattern in types))
        self._where = {name: tuple(alternatives(wanted)) for name, wanted in (where or {}).items()}
        self._scope = scope

    def __repr__(self) -> str:
        """Return what tells it from other filters."""
        return json.dumps([self._types, self._where, self._scope])

    def matches(self, event: StoredEvent) -> bool:
        """Return whether the sink receives an event."""
        return self.refusal(event) is None

    def refusal(self, event: StoredEvent) -> tuple[str, str] | None:
        """Return which key leaves an event out and why, in words; None if the sink receives it."""
        if not self.matches_type(event.type):
            return "types", f"{event.type} matches none of {', '.join(self._types)}"
        for name, wanted in self._where.items():
            found = _look_up(event.envelope, name)
            if not _equals_one(found, wanted):
                expected = " or ".join(map(json.dumps, wanted))
                return "where", f"{name} is {json.dumps(found)}, wanted {expected}"
        # Only this VM publishes its own events and receipts.
        if self._scope != "all" and "reporter" not in event.envelope:
            return _find_other_vm(event.envelope, first=self._scope == "first")
        return None

    def matches_type(self, event_type: str) -> bool:
        """Return whether the sink receives events of this type."""
        return self._expression.fullmatch(event_type) is not None


def _find_other_vm(envelope: Mapping[str, Json], *, first: bool) -> tuple[str, str] | None:
    """Return None if an event affects this VM, or may do so; else the key `scope` and why."""
    resources = names(_look_up(envelope, "Resources"))
    # Without an id, the name is only that of the host, unless the settings name the VM.
    is_known = _look_up(envelope, "Vm.VmId") or _look_up(envelope, "AffectsThisVm") is not None
    if not resources or not is_known:
        return None
    name = str(_look_up(envelope, "Vm.Name"))
    if is_among(name, resources[:1] if first else resources):
        return None
    order = " in this order" if first else ""
    return "scope", f"the event names {', '.join(resources)}{order}, this VM is {name}"


def _look_up(envelope: Mapping[str, Json], name: str) -> Json:
    if name != "data" and name in envelope:
        return envelope[name]
    value: Json = envelope.get("data")
    for step in name.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    return value


def _equals_one(found: Json, wanted: Sequence[Json]) -> bool:
    candidates = found if isinstance(found, list) else [found]
    # A bool equals 0 or 1 in Python, but not in JSON.
    return any(
        candidate == value and isinstance(candidate, bool) == isinstance(value, bool)
        for candidate in candidates
        for value in wanted
    )
