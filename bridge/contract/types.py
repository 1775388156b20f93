"""The names of event types."""

from __future__ import annotations

TYPE_PREFIX = "io.imdsbridge."


def type_of(name: str) -> str:
    """Give the CloudEvents type of an event called, for example, `document.changed`."""
    return f"{TYPE_PREFIX}{name}.v1"
