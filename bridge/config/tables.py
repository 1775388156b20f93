"""Every table that the configuration can have, with its settings; for hints and for the JSON Schema."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pkgutil import resolve_name

from bridge.config.base import Settings
from bridge.config.models import Config
from bridge.config.registry import FORMATS, SINK_KINDS, format_class, sink_settings

SINK = "sinks.NAME"
# The sections that are loaded only if they are written; each may receive from a bus.
SECTIONS = {
    "approvals": "bridge.config.approvals:ApprovalSettings",
    "relay": "bridge.config.bus:RelaySettings",
    "console": "bridge.config.console:ConsoleSettings",
}


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of the configuration: its full name, the condition under which it is so, and its settings."""

    name: str
    condition: str = ""
    settings: type[Settings]

    def full_name(self, key: str) -> str:
        """Return the name that a key of the table has in the whole configuration."""
        return f"{self.name}.{key}{self.condition}" if self.name else f"{key} before the first [table]"


def tables() -> Iterator[Table]:
    """Yield every table, those that a table contains after it."""
    yield from _with_inner(Table(name="", settings=Config))
    for section, settings in SECTIONS.items():
        yield from _with_inner(Table(name=section, settings=resolve_name(settings)))
    yield from sink_tables()


def sink_tables() -> Iterator[Table]:
    """Yield the table of every kind of sink, and of every format of a webhook after what all have."""
    for kind in SINK_KINDS:
        yield Table(name=SINK, condition=f' with kind = "{kind}"', settings=sink_settings(kind))
    for name in FORMATS:
        condition = f' with kind = "webhook" and format = "{name}"'
        yield Table(name=SINK, condition=condition, settings=format_class(name).settings)


def _with_inner(table: Table) -> Iterator[Table]:
    yield table
    for key in table.settings.model_fields:
        if inner := table.settings.inner_settings(key):
            name = f"{table.name}.{key}" if table.name else key
            yield from _with_inner(Table(name=name, settings=inner))
