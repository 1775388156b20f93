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
    from bridge.config.sinks import SinkSettings
else:
    # The loader validates each part with its own settings, and imports only those that are configured.
    ApprovalSettings = RelaySettings = SinkSettings = Any

_TOKEN = re.compile(r"[!-~]+")


def _check_source(value: str) -> str:
    if value and not _TOKEN.fullmatch(value):
        raise ValueError("expected a URI without spaces, for example urn:contoso:fleet")
    return value


class Config(Settings):
    """The whole configuration.

    `source` and `vm_source` override the CloudEvents source of the group's and of the VM's own events.
    """

    state_dir: Path = Path(
        r"C:\ProgramData\imds-bridge\state" if sys.platform == "win32" else "/var/lib/imds-bridge"
    )
    stop_seconds: float = Field(default=5.0, ge=0, le=600)
    max_outbox_mb: float = Field(default=1024, gt=0)
    retain_seconds: float = Field(default=7 * DAY_SECONDS, ge=0)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "json", "text"] = "auto"
    source: Annotated[str, AfterValidator(_check_source)] = ""
    vm_source: Annotated[str, AfterValidator(_check_source)] = ""
    imds: ImdsSettings = Field(default_factory=ImdsSettings)
    metrics: MetricsSettings = Field(default_factory=MetricsSettings)
    sinks: Mapping[str, SinkSettings] = Field(default_factory=dict)
    approvals: ApprovalSettings | None = None
    relay: RelaySettings | None = None
    _path: Path | None = PrivateAttr(default=None)

    @property
    def path(self) -> Path | None:
        """The file that the settings were read from, None if there was none."""
        return self._path

    def read_from(self, path: Path) -> Self:
        """Remember the file that the settings were read from."""
        self._path = path
        return self
