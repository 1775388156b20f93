"""CloudEvents as values: as built, and as the outbox stores them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from bridge.runtime.json import Json


@dataclass(frozen=True, kw_only=True)
class CloudEvent:
    """A CloudEvent 1.0; `extensions` are its further attributes, all strings."""

    id: str
    source: str
    type: str
    subject: str
    time: datetime
    dataschema: str
    extensions: Mapping[str, str]
    data: Mapping[str, Json]


@dataclass(frozen=True, kw_only=True)
class StoredEvent:
    """An event as the outbox keeps it.

    `seq` is its position in the outbox, `body` the CloudEvent as structured JSON, `stored_at` steady seconds
    since 1970.
    """

    seq: int
    id: str
    type: str
    stored_at: float
    body: bytes

    @cached_property
    def envelope(self) -> dict[str, Json]:
        """The CloudEvent as a dictionary."""
        parsed: dict[str, Json] = json.loads(self.body)
        return parsed
