"""Who this process is to Azure: credentials from settings, with time limits, and nothing of them in any log."""

from __future__ import annotations

import logging
import os
from typing import Any

from bridge.config.bus import IdentitySettings

# azure-identity waits minutes for an IMDS that fails; the caller tries again anyway.
_TOKEN_CONNECT_SECONDS = 2.0
_TOKEN_READ_SECONDS = 5.0


def make_credential(settings: IdentitySettings) -> Any:
    """Make the credential that the settings ask for; it keeps its tokens and renews them in time."""
    quieten()
    if settings.credential == "managed_identity":
        return _managed_identity(settings)
    from azure.identity import (  # noqa: PLC0415 - 42 MiB that a key does not need
        ChainedTokenCredential,
        DefaultAzureCredential,
        EnvironmentCredential,
    )

    # The order of DefaultAzureCredential, which could not be told to ask IMDS without a proxy.
    rest = DefaultAzureCredential(
        exclude_environment_credential=True,
        exclude_workload_identity_credential=True,
        exclude_managed_identity_credential=True,
    )
    return ChainedTokenCredential(EnvironmentCredential(), _managed_identity(settings), rest)


def _managed_identity(settings: IdentitySettings) -> Any:
    from azure.identity import ManagedIdentityCredential  # noqa: PLC0415

    options: dict[str, Any] = {
        "retry_total": 0,
        "connection_timeout": _TOKEN_CONNECT_SECONDS,
        "read_timeout": _TOKEN_READ_SECONDS,
    }
    if "AZURE_FEDERATED_TOKEN_FILE" not in os.environ:  # workload identity is no IMDS and may need the proxy
        options["use_env_settings"] = False  # IMDS never through a proxy
    return ManagedIdentityCredential(client_id=settings.client_id or None, **options)


def quieten() -> None:
    """Silence the libraries, which would log each failure and at debug level tokens; our own lines say it once."""
    for name in ("azure", "azure.servicebus", "azure.identity", "msal"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
