"""The command line in this process, and configurations and outboxes for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.events.filters import Filter
from tests.support.imds_lab import ImdsLab
from tests.support.outbox import OTHER_TYPE, event, open_outbox
from tests.support.process import toml


@dataclass(frozen=True)
class CommandResult:
    """What a command in this process returned and printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What was printed, as JSON."""
        return json.loads(self.out)


Call = Callable[..., CommandResult]


def sinks(config: Path, lab: ImdsLab, **sinks: dict[str, Any]) -> None:
    """Write a configuration with these sinks."""
    config.write_text(
        toml({"state_dir": config.parent / "state", "imds": {"endpoint": lab.url("web-0")}, "sinks": sinks})
    )


def fill(config: Path) -> None:
    """Leave three events in an outbox, of which two are dead letters of sink ops, and one waits for it."""
    outbox = open_outbox(
        config.parent / "state" / "forward", sinks={"ops": (Filter(), True), "other": (Filter(), False)}
    )
    for name, type_ in (("one", OTHER_TYPE), ("two", OTHER_TYPE), ("three", OTHER_TYPE)):
        outbox.commit([event(name, type_=type_)])
    for sent in outbox.pending("ops", 2):
        outbox.acknowledge("ops", [sent], dead=("rejected", f"{sent.id} was refused"))
    outbox.close()
