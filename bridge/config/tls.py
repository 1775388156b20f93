"""Check the certificate files that settings name; a passphrase is never asked for."""

from __future__ import annotations

import ssl
from pathlib import Path

from bridge.config.validators import quote_path


def check_ca(path: Path) -> None:
    """Refuse a file without CA certificates.

    Raises:
        ValueError: what is wrong with it.
    """
    _check_readable(path)
    try:
        _context().load_verify_locations(cafile=path)
    except OSError as error:
        raise ValueError(f"{path}: expected CA certificates in PEM") from error


def check_certificate(certificate: Path, key: Path | None) -> None:
    """Refuse a client certificate that cannot be used; without `key`, its file must hold the key as well.

    Raises:
        ValueError: what is wrong with it.
    """

    def refuse() -> str:
        raise ValueError(
            f"{key or certificate}: the private key is encrypted; expected one without passphrase"
        )

    for path in filter(None, (certificate, key)):
        _check_readable(path)
    try:
        _context().load_cert_chain(certificate, key, password=refuse)
    except OSError as error:
        names = f"{certificate} and {key}" if key else str(certificate)
        if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            raise ValueError(f"{names}: the private key does not belong to the certificate") from error
        raise ValueError(f"{names}: expected a certificate and its private key in PEM") from error


def _context() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _check_readable(path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        raise ValueError(f"given {quote_path(path)}: {error.strerror}") from error
