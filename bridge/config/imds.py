"""Where IMDS is and how often it is asked."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from bridge.config.base import Settings
from bridge.config.validators import (
    check_url,
)

ApiVersion = Literal[
    "2017-03-01", "2017-08-01", "2017-11-01", "2019-01-01", "2019-04-01", "2019-08-01", "2020-07-01"
]

# The first api-version that has a property or an event type; the others are in every version.
FIRST_VERSIONS = {
    "Preempt": "2017-11-01",
    "Terminate": "2019-01-01",
    "Description": "2019-04-01",
    "EventSource": "2019-08-01",
    "DurationInSeconds": "2020-07-01",
}


class ImdsSettings(Settings):
    """Where IMDS is and how often it is polled."""

    endpoint: str = Field(
        default="http://169.254.169.254", json_schema_extra={"pattern": "^(discover$|http://)"}
    )
    """The address of IMDS; `discover` finds it by DHCP option 245 or the environment variable SCHEDULEDEVENTSIP,
    outside a virtual network. Example: `"discover"`."""
    api_version: ApiVersion = "2020-07-01"
    """The version of Scheduled Events that is asked for; older ones lack properties."""
    poll_seconds: float = Field(default=1.0, ge=0.2, le=60)
    """The time between two polls; IMDS answers five requests a second for all processes of a VM. Example: `2`."""
    vm_name: str = ""
    """This VM's name where there is no instance data, such as on a mock server; instance data is then not read.
    Example: `"web-0"`."""

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, value: str) -> str:
        if value == "discover":
            return value
        if value.startswith("https:"):
            raise ValueError("expected http://address: IMDS does not use TLS")
        return check_url(value.rstrip("/"), allow_http=True)

    @field_validator("vm_name")
    @classmethod
    def _check_vm_name(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9._-]{0,128}", value):
            raise ValueError("expected the name of this VM as in Resources, for example web-0 or web_0")
        return value

    def lack(self, name: str) -> str:
        """Return why no document has a property or event type, "" if documents of this api-version have it."""
        first = FIRST_VERSIONS.get(name, "")
        if self.api_version >= first:
            return ""
        return f"{name} comes with api_version {first}, and [imds] asks for {self.api_version}"
