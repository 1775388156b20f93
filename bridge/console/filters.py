"""The filters that stand in the address of a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from urllib.parse import urlencode

from bridge.console.queries import EventRow, VmRow, Where
from bridge.imds.document import fold_name

MAX_CHARACTERS = 200


@dataclass(frozen=True, kw_only=True)
class Filter:
    """What to show; "" shows all. `vm` is a part of a VM's name or the beginning of an EventId."""

    type: str = ""
    status: str = ""
    source: str = ""
    group: str = ""
    vm: str = ""

    @property
    def is_set(self) -> bool:
        """Whether anything is left out."""
        return any(getattr(self, field.name) for field in fields(self))

    def matches(self, event: EventRow) -> bool:
        """Return whether to show an event."""
        return (
            self.type in ("", event.event_type)
            and self.status in ("", event.status)
            and self.source in ("", event.event_source)
            and self.group in ("", event.group_name)
            and (not self.vm or self._is_of_vm(event))
        )

    def matches_vm(self, vm: VmRow) -> bool:
        """Return whether to show a VM."""
        return self.group in ("", vm.group_name) and fold_name(self.vm) in vm.name.casefold()

    def of_events(self) -> Where:
        """Return the filter as a condition on the table `scheduled`; the status of open events is also Open."""
        equal = {"event_type": self.type, "event_source": self.source, "group_name": self.group}
        found = [(f"{column} = ?", [value]) for column, value in equal.items() if value]
        if self.status:
            found.append(("? IN (status, iif(is_open, 'Open', ''))", [self.status]))
        if wanted := fold_name(self.vm):
            found.append(("(instr(event_id, ?) = 1 OR instr(lower(resources), ?))", [wanted, wanted]))
        return _all_of(found)

    def of_vms(self) -> Where:
        """Return the filter as a condition on the table `vm`."""
        found = [("group_name = ?", [self.group])] if self.group else []
        if wanted := fold_name(self.vm):
            found.append(("instr(lower(name), ?)", [wanted]))
        return _all_of(found)

    def query(self, **changes: str) -> str:
        """Return the filter, with changes, as the end of an address: `?type=Reboot`, "" if there is none."""
        values = {field.name: getattr(self, field.name) for field in fields(self)} | changes
        encoded = urlencode({name: value for name, value in values.items() if value})
        return f"?{encoded}" if encoded else ""

    def _is_of_vm(self, event: EventRow) -> bool:
        wanted = fold_name(self.vm)
        return event.event_id.startswith(wanted) or any(wanted in name.casefold() for name in event.resources)


def read_filter(query: Mapping[str, str]) -> Filter:
    """Read a filter from an address; other parts of it do not matter."""
    return Filter(
        **{field.name: query.get(field.name, "")[:MAX_CHARACTERS].strip() for field in fields(Filter)}
    )


def _all_of(conditions: Sequence[tuple[str, list[str]]]) -> Where:
    return Where(
        " AND ".join(condition for condition, _ in conditions) or "1",
        tuple(value for _, values in conditions for value in values),
    )


def choices(values: Iterable[str], *usual: str) -> list[str]:
    """Return what a filter offers: the usual values, and then others that occur."""
    return [*usual, *sorted(set(values) - {*usual, ""})]
