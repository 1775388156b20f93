"""Where a load balancer asks whether this VM is in work."""

from __future__ import annotations

from pydantic import Field, field_validator

from bridge.config.base import Settings
from bridge.config.values import check_url, socket_address


class InServiceSettings(Settings):
    """Where `listen` answers `GET /in-service`: 200 while this VM is in work, else 503."""

    listen: str = Field(default="0.0.0.0:8084", json_schema_extra={"pattern": r"^.+:[0-9]{1,5}$"})
    """The address and port; anybody who reaches it may ask. Example: `"10.0.0.4:8084"`."""
    also: str = Field(default="", json_schema_extra={"pattern": "^$|^http://"})
    """The application's own health on this VM, which has to answer 200 within a second as well: a load balancing
    rule has one probe. Example: `"http://127.0.0.1:8080/health"`."""

    @field_validator("listen")
    @classmethod
    def _check_listen(cls, value: str) -> str:
        socket_address(value)
        return value

    @field_validator("also")
    @classmethod
    def _check_also(cls, value: str) -> str:
        if value.lower().startswith("https:"):
            raise ValueError("expected http://address: it is asked on this VM, without TLS")
        return check_url(value, allow_http=True) if value else ""
