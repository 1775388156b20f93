"""Where a process serves its metrics and its health."""

from __future__ import annotations

from socket import AF_INET, AF_INET6, AddressFamily

from pydantic import Field, field_validator

from bridge.config.base import Settings


class MetricsSettings(Settings):
    """Where a process serves its metrics and its health; anybody who reaches the port may read."""

    listen: str = Field(default="", json_schema_extra={"pattern": r"^$|^.+:[0-9]{1,5}$"})
    """The address and port of `/metrics`, `/livez` and `/readyz`; empty serves nothing. Example:
    `"127.0.0.1:9464"`."""

    @field_validator("listen")
    @classmethod
    def _check_listen(cls, value: str) -> str:
        if value:
            socket_address(value)
        return value


def socket_address(listen: str) -> tuple[AddressFamily, tuple[str, int]]:
    """Return the family, the host and the port of an address to listen on.

    Raises:
        ValueError: it has another form.
    """
    host, _, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:  # noqa: PLR2004 - the highest port
        raise ValueError("expected an address and a port, for example 127.0.0.1:9464 or [::1]:9464")
    return AF_INET6 if ":" in host else AF_INET, (host, int(port))
