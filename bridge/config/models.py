"""The whole configuration, with IMDS and metrics; who else may change what it names."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, PrivateAttr, field_validator

from bridge.config.base import DAY_SECONDS, Fault, Settings
from bridge.config.values import check_listen, check_url
from bridge.contract.types import API_VERSION, FIRST_VERSIONS


class ImdsSettings(Settings):
    """Where IMDS is and how often it is polled."""

    endpoint: str = Field(
        default="http://169.254.169.254", json_schema_extra={"pattern": "^(discover$|http://)"}
    )
    """The address of IMDS; `discover` finds it outside a virtual network: by the environment variable
    SCHEDULEDEVENTSIP, or by DHCP option 245 in a lease of dhclient or systemd-networkd. Example: `"discover"`."""
    api_version: str = Field(default=API_VERSION, pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")
    """The version of Scheduled Events that is asked for. Older ones lack properties; while IMDS does not know a newer
    one, `2020-07-01` is asked for. Example: `"2024-07-09"`."""
    poll_seconds: float = Field(default=1.0, ge=0.2, le=60)
    """The time between two polls; IMDS answers five requests a second for all processes of a VM. Example: `2`."""
    vm_name: str = Field(default="", pattern=r"^[A-Za-z0-9._-]{0,128}$")
    """This VM's name where there is no instance data, such as on a mock server; instance data is then not read.
    Example: `"web-0"`."""

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, value: str) -> str:
        if value == "discover":
            return value
        if value.startswith("https:"):
            raise ValueError("expected http://address: IMDS does not use TLS")
        if "/metadata" in value or "?" in value:
            raise ValueError("expected the address alone, such as http://169.254.169.254: the rest is added")
        return check_url(value.rstrip("/"), allow_http=True)

    def lack(self, name: str) -> str:
        """Return why no document has a property or event type, "" if documents of this api-version have it."""
        for known, first in FIRST_VERSIONS.items():
            if known.lower() == name.lower() and self.api_version < first:
                return f"{known} comes with api_version {first}, and [imds] asks for {self.api_version}"
        return ""


class MetricsSettings(Settings):
    """Where a process serves its metrics and its health; anybody who reaches the port may read."""

    listen: str = Field(default="", json_schema_extra={"pattern": r"^$|^.+:[0-9]{1,5}$"})
    """The address and port of `/metrics`, `/livez` and `/readyz`; where another process has the port, the next one.
    Empty serves nothing. Example: `"127.0.0.1:9464"`."""
    next_port: bool = True
    """Whether the next port is taken where another process has this one. If not, such as where a probe asks the port,
    there are no metrics, and the process is not ready."""
    _check_listen = field_validator("listen")(check_listen)


if TYPE_CHECKING:
    from bridge.config.approvals import ApprovalSettings
    from bridge.config.bus import RelaySettings
    from bridge.config.console import ConsoleSettings
    from bridge.config.in_service import InServiceSettings
    from bridge.config.sinks import SinkSettings
else:
    # The loader validates each part with its own settings, and imports only those that are configured.
    ApprovalSettings = ConsoleSettings = InServiceSettings = RelaySettings = SinkSettings = Any

_URI = "^[!-~]*$"


class Config(Settings):
    """The whole configuration."""

    state_dir: Path = Path(
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
    source: str = Field(default="", pattern=_URI)
    """The CloudEvents `source` of Scheduled Events, instead of the ARM id of the scale set or the resource group.
    Example: `"urn:contoso:fleet"`."""
    vm_source: str = Field(default="", pattern=_URI)
    """The CloudEvents `source` of the VM's own events, instead of the VM's ARM id. Example:
    `"urn:contoso:vm:web-0"`."""
    console_url: str = Field(default="", max_length=200, pattern=r"^[A-Za-z0-9:/._~%\[\]-]*$")
    """The address that people open the console at: chat messages and alerts link to an event's page there. Example:
    `"https://console.contoso.example"`."""
    documents: Literal["all", "named"] = "all"
    """Which changes `forward` publishes as `document.changed`, too: all, or only those of events that name this VM;
    then the next heartbeat lists the others. `"named"` spares a group one copy of each document for each VM, and
    Service Bus sinks hold events that name only other VMs, for 150 s at most."""
    imds: ImdsSettings = Field(default_factory=ImdsSettings)
    """Where IMDS is and how often it is polled."""
    metrics: MetricsSettings = Field(default_factory=MetricsSettings)
    """Where metrics and health are served."""
    sinks: Mapping[str, SinkSettings] = Field(default_factory=dict)
    """Where events go: any number of tables `[sinks.NAME]`; without one, events are printed to standard output."""
    approvals: ApprovalSettings | None = None
    """Where approve commands come from and what may be approved."""
    in_service: InServiceSettings | None = None
    """Where `imds-bridge listen` answers a load balancer's probe."""
    relay: RelaySettings | None = None
    """Where `imds-bridge relay` receives events from."""
    console: ConsoleSettings | None = None
    """Where `imds-bridge console` listens, where its events come from, and who may look."""
    _path: Path | None = PrivateAttr(default=None)
    _variables: Mapping[str, str] = PrivateAttr(default_factory=dict)

    @field_validator("console_url")
    @classmethod
    def _check_console_url(cls, value: str) -> str:
        return check_url(value.rstrip("/"), allow_http=False) if value else ""

    def find_faults(self) -> Iterator[Fault]:
        """Yield criteria that no document of the api-version can meet, and sinks that send to what is received."""
        compared = [
            (f"sinks.{sink}.where.{name}", part)
            for sink, settings in self.sinks.items()
            for name in settings.where
            for part in name.split(".")
        ]
        if self.approvals:
            compared += [(f"approvals.{key}", name) for key, name in self.approvals.compared_properties()]
        for key, name in compared:
            if lack := self.imds.lack(name):
                yield key, f"{lack}; expected a newer api_version, or no such criterion"
        for number, rule in enumerate(self.approvals.auto if self.approvals else ()):
            if rule.leave_seconds is not None and not self.in_service:
                text = "given, expected only with [in_service], where a load balancer asks"
                yield f"approvals.auto[{number}].leave_seconds", text
        if self.imds.vm_name and self.approvals and re.search("{(res|sub)", self.approvals.session):
            text = "given with a session of more than {vm}; expected instance data, which has it"
            yield "imds.vm_name", text
        for section, source in (("approvals", self.approvals), ("relay", self.relay)):
            yield from source.find_loops(section, self.sinks) if source else ()

    @property
    def path(self) -> Path | None:
        """The file that the settings were read from, None if there was none."""
        return self._path

    @property
    def policy_variables(self) -> tuple[str, ...]:
        """The environment variables that set parts of the policy for approvals."""
        return tuple(
            variable
            for key, variable in self._variables.items()
            if f"{key}.".startswith("approvals.policy.") or key in ("approvals", "approvals.auto")
        )

    def read_from(self, path: Path, variables: Mapping[str, str]) -> Self:
        """Remember the file that the settings were read from, and by key the variables that replaced some."""
        self._path, self._variables = path, variables
        return self


def find_exposed(config: Config, role: str) -> Iterator[Path]:
    """Yield what everybody may write of a process: its configuration, the files that it names, and its state."""
    files = [*([config.path] if config.path else ()), *_named_files(config.model_dump())]
    folders = [config.state_dir, config.state_dir / role]
    for file in files:
        folders += [file.parent, Path(os.path.realpath(file)).parent]
    yield from filter(_is_exposed, dict.fromkeys([*files, *folders]))


def _is_exposed(path: Path) -> bool:
    if sys.platform == "win32":  # permissions are lists there, of which stat shows nothing
        return False
    try:
        mode = path.stat().st_mode
        # The kubelet mounts ConfigMaps as 0777, read-only everywhere; a bind that is read-only here has no such link.
        is_kubelets = (path / "..data").is_symlink() and os.statvfs(path).f_flag & os.ST_RDONLY
    except (OSError, ValueError):
        return False
    if is_kubelets:
        return False
    # In a folder with the sticky bit, such as /tmp, only its owner can replace a file.
    return bool(mode & stat.S_IWOTH) and not (stat.S_ISDIR(mode) and mode & stat.S_ISVTX)


def _named_files(settings: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the files that settings name: of secrets, certificates and keys."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _named_files(value)
        elif isinstance(value, Path) and key.endswith("file"):
            yield value
