"""The command line in this process, and configurations and outboxes for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.delivery.queue import Queue
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

    def row(self, **wanted: str) -> dict[str, str]:
        """Return the only row of printed JSON with these values."""
        rows = [row for row in self.json if wanted.items() <= row.items()]
        assert len(rows) == 1, f"expected one row with {wanted}: {self.json}"
        return dict(rows[0])


Call = Callable[..., CommandResult]


class Cli:
    """The command line in this process, with a configuration of its own."""

    def __init__(self, call: Call, config: Path, imds: Callable[[], ImdsLab]) -> None:
        self._call, self.config, self._imds = call, config, imds

    def __call__(self, *arguments: str) -> CommandResult:
        """Run a command with the configuration."""
        return self._call(*arguments, "--config", self.config)

    def check(self, *options: str) -> CommandResult:
        """Run `check` for rows of JSON."""
        return self("check", "--json", *options)

    def write(self, **settings: Any) -> None:
        """Write these settings."""
        self.config.write_text(toml({"state_dir": self.config.parent / "state", **settings}))

    def here(self, **settings: Any) -> None:
        """Write these settings, and the lab's IMDS."""
        self.write(imds={"endpoint": self._imds().url("web-0")}, **settings)

    def sinks(self, **sinks: dict[str, Any]) -> None:
        """Write these sinks, and the lab's IMDS."""
        self.here(sinks=sinks)

    def state(self, role: str = "forward") -> Path:
        """Return the state folder of a role."""
        return self.config.parent / "state" / role

    def fill(self) -> None:
        """Leave three events that wait for sink other; two are dead letters of sink ops, one failed there twice."""
        outbox = open_outbox(self.state(), sinks={"ops": (Filter(), True), "other": (Filter(), False)})
        for name in ("one", "two", "three"):
            outbox.commit([event(name, type_=OTHER_TYPE)])
        for sent in outbox.pending("ops", 2):
            outbox.acknowledge("ops", [sent], dead=("rejected", f"{sent.id} was refused"))
        queue = Queue("ops", outbox.storage)
        head = queue.head(3)
        assert head
        due_at = outbox.now().steady + 30
        queue.note_failure(head._replace(tries=1), due_at=due_at, is_asked=False)
        outbox.close()
