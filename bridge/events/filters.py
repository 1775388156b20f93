"""Decide which events a sink takes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from bridge.events.model import StoredEvent
from bridge.imds.document import is_among, names
from bridge.runtime.json import Json


class Filter:
    """Which events a sink takes: `types` with `*`, and `where`, equality with attributes or data.

    A name in `where` is looked for among the attributes first, then in `data`; dots lead into objects. Where
    the event holds a list, one equal element is enough. `scope` "self" takes what names this VM, and what names
    none or where it is unknown who this VM is; "first" what names it first.
    """

    def __init__(
        self, *, types: Sequence[str] = ("*",), where: Mapping[str, Json] | None = None, scope: str = "all"
    ) -> None:
        patterns = (".*".join(map(re.escape, pattern.split("*"))) for pattern in types)
        self._types = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
        self._where = {
            name: tuple(wanted) if isinstance(wanted, list | tuple) else (wanted,)
            for name, wanted in (where or {}).items()
        }
        self._scope = scope

    def matches(self, event: StoredEvent) -> bool:
        """Tell whether the sink wants an event."""
        if not self.matches_type(event.type):
            return False
        return (not self._where or self._matches_where(event.envelope)) and (
            self._scope == "all"
            or "reporter" in event.envelope  # nobody else tells of the VM's own events and receipts
            or _concerns(event.envelope.get("data"), first=self._scope == "first")
        )

    def matches_type(self, event_type: str) -> bool:
        """Tell whether the sink wants events of this type at all."""
        return self._types.fullmatch(event_type) is not None

    def _matches_where(self, envelope: Mapping[str, Json]) -> bool:
        return all(_equals_one(_look_up(envelope, name), wanted) for name, wanted in self._where.items())


def _concerns(data: Json, *, first: bool) -> bool:
    """Tell whether an event is about this VM; what may be counts as being."""
    told = data if isinstance(data, dict) else {}
    vm = told.get("Vm")
    who = vm if isinstance(vm, dict) else {}
    resources = names(told.get("Resources"))
    if not resources or not who.get("VmId"):  # without an id, the name is only that of the host
        return True
    return is_among(str(who.get("Name")), resources[:1] if first else resources)


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
