"""Credentials from settings, with time limits; the SDK's own log lines are silenced."""

from __future__ import annotations

import logging
import os
from typing import Any

from bridge.config.bus import IdentitySettings

# azure-identity waits for minutes and retries for minutes more; the caller retries anyway.
_LIMITS: dict[str, Any] = {"retry_total": 0, "connection_timeout": 2.0, "read_timeout": 5.0}


def make_credential(settings: IdentitySettings) -> Any:
    """Make the credential that the settings ask for; it caches and renews its tokens."""
    quieten()
    if settings.credential == "managed_identity":
        return _managed_identity(settings)
    from azure.identity import (  # noqa: PLC0415 - 42 MiB that a key does not need
        ChainedTokenCredential,
        DefaultAzureCredential,
        EnvironmentCredential,
    )

    # The order of DefaultAzureCredential, which has no option to ask IMDS without a proxy.
    rest = DefaultAzureCredential(
        exclude_environment_credential=True,
        exclude_workload_identity_credential=True,
        exclude_managed_identity_credential=True,
        **_LIMITS,
    )
    return ChainedTokenCredential(EnvironmentCredential(**_LIMITS), _managed_identity(settings), rest)


def _managed_identity(settings: IdentitySettings) -> Any:
    from azure.identity import ManagedIdentityCredential  # noqa: PLC0415

    options = dict(_LIMITS)
    # Workload identity does not ask IMDS and may need the proxy.
    if "AZURE_FEDERATED_TOKEN_FILE" not in os.environ:
        options["use_env_settings"] = False  # IMDS never through a proxy
    return ManagedIdentityCredential(client_id=settings.client_id or None, **options)


def quieten() -> None:
    """Silence the SDK's loggers: they repeat every failure, which we log once, and write tokens at debug level."""
    for name in ("azure", "azure.servicebus", "azure.identity", "msal"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
