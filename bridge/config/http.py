"""How a receiver is reached over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field, model_validator

from bridge.config.base import Secret, Settings
from bridge.config.validators import (
    check_proxy,
)


class HttpSettings(Settings):
    """How a receiver is reached over HTTP.

    With `ca_file`, only the authorities in it are trusted. `proxy` may hold user and password.
    """

    allow_http: bool = False
    ca_file: Path | None = None
    client_certificate_file: Path | None = None
    client_key_file: Path | None = None
    proxy: Secret | None = None
    timeout_seconds: float = Field(default=10.0, gt=0, le=120)
    secret_checks: ClassVar = {"proxy": check_proxy}

    @model_validator(mode="after")
    def _check_certificates(self) -> HttpSettings:
        if not (self.ca_file or self.client_certificate_file or self.client_key_file):
            return self
        from bridge.config.tls import check_ca, check_certificate  # noqa: PLC0415 - few need ssl this early

        if self.client_key_file and not self.client_certificate_file:
            raise ValueError("client_key_file: expected a client_certificate_file, too")
        try:
            name = "client_certificate_file"
            if self.client_certificate_file:
                check_certificate(self.client_certificate_file, self.client_key_file)
            name = "ca_file"
            if self.ca_file:
                check_ca(self.ca_file)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return self
