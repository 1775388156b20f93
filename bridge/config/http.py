"""How a receiver is reached over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from bridge.config.base import Fault, Secret, Settings, try_setting
from bridge.config.validators import (
    check_proxy,
)


class HttpSettings(Settings):
    """How a receiver is reached over HTTP."""

    allow_http: bool = False
    """Whether plain http to another machine is allowed."""
    ca_file: Path | None = None
    """A PEM file of the only authorities that are trusted. Example: `"/etc/imds-bridge/ca.pem"`."""
    client_certificate_file: Path | None = None
    """A PEM file of the certificate for mutual TLS, with or without its key. Example:
    `"/etc/imds-bridge/client.pem"`."""
    client_key_file: Path | None = None
    """A PEM file of the key, if it is not in the certificate's file. Example:
    `"/etc/imds-bridge/client-key.pem"`."""
    proxy: Secret | None = None
    """The HTTP proxy; it may contain user and password. Example: `"http://proxy.contoso.com:3128"`."""
    timeout_seconds: float = Field(default=10.0, gt=0, le=120)
    """How long one request may take. Example: `5`."""
    secret_checks: ClassVar = {"proxy": check_proxy}

    def find_faults(self) -> Iterator[Fault]:
        """Yield certificates and keys that cannot be used."""
        yield from super().find_faults()
        if not (self.ca_file or self.client_certificate_file or self.client_key_file):
            return
        from bridge.config.tls import check_ca, check_certificate  # noqa: PLC0415 - few need ssl this early

        certificate, key = self.client_certificate_file, self.client_key_file
        if key and not certificate:
            yield "client_key_file", "expected a client_certificate_file, too"
        if certificate:
            yield from try_setting("client_certificate_file", partial(check_certificate, certificate, key))
        if self.ca_file:
            yield from try_setting("ca_file", partial(check_ca, self.ca_file))
