"""The whole configuration."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr

from bridge.config.base import DAY_SECONDS, Settings
from bridge.config.imds import ImdsSettings
from bridge.config.metrics import MetricsSettings

if TYPE_CHECKING:
    from bridge.config.approvals import ApprovalSettings
    from bridge.config.bus import RelaySettings
    from bridge.config.console import ConsoleSettings
    from bridge.config.sinks import SinkSettings
else:
    # The loader validates each part with its own settings, and imports only those that are configured.
    ApprovalSettings = ConsoleSettings = RelaySettings = SinkSettings = Any

_TOKEN = re.compile(r"[!-~]+")


def _check_source(value: str) -> str:
    if value and not _TOKEN.fullmatch(value):
        raise ValueError("expected a URI without spaces, for example urn:contoso:fleet")
    return value


def _check_path(value: Path) -> Path:
    if "\0" in str(value):
        raise ValueError("expected a path without NUL")
    return value


class Config(Settings):
    """The whole configuration."""

    state_dir: Annotated[Path, AfterValidator(_check_path)] = Path(
        r"C:\ProgramData\imds-bridge\state" if sys.platform == "win32" else "/var/lib/imds-bridge"
    )
    """The folder for the state of each process; it must survive a restart. Example: `"/srv/imds-bridge"`."""
    stop_seconds: float = Field(default=5.0, ge=0, le=600)
    """How long waiting events are still delivered after SIGTERM. Example: `30`."""
    max_outbox_mb: float = Field(default=1024, ge=16, le=1_000_000)
    """The largest size of the outbox; above it, the oldest waiting events are dropped, logged as an error and
    published as `bridge.loss`. Example: `256`."""
    retain_seconds: float = Field(default=7 * DAY_SECONDS, ge=0)
    """How long delivered events are kept, for `outbox list` and new sinks with `from_start`. Example: `86400`."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe messages that are logged."""
    log_format: Literal["auto", "json", "text"] = "auto"
    """How log lines are written; `auto` is text on a terminal and JSON elsewhere."""
    source: Annotated[str, AfterValidator(_check_source)] = ""
    """The CloudEvents `source` of Scheduled Events, instead of the ARM id of the scale set or the resource group.
    Example: `"urn:contoso:fleet"`."""
    vm_source: Annotated[str, AfterValidator(_check_source)] = ""
    """The CloudEvents `source` of the VM's own events, instead of the VM's ARM id. Example:
    `"urn:contoso:vm:web-0"`."""
    imds: ImdsSettings = Field(default_factory=ImdsSettings)
    """Where IMDS is and how often it is polled."""
    metrics: MetricsSettings = Field(default_factory=MetricsSettings)
    """Where metrics and health are served."""
    sinks: Mapping[str, SinkSettings] = Field(default_factory=dict)
    """Where events go: any number of tables `[sinks.NAME]`; without one, events are printed to standard output."""
    approvals: ApprovalSettings | None = None
    """Where approve commands come from and what may be approved."""
    relay: RelaySettings | None = None
    """Where `imds-bridge relay` receives events from."""
    console: ConsoleSettings | None = None
    """Where `imds-bridge console` listens, where its events come from, and who may look."""
    _path: Path | None = PrivateAttr(default=None)

    @property
    def path(self) -> Path | None:
        """The file that the settings were read from, None if there was none."""
        return self._path

    def read_from(self, path: Path) -> Self:
        """Remember the file that the settings were read from."""
        self._path = path
        return self
