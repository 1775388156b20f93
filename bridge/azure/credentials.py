"""Credentials from settings, with time limits; the SDK's own log lines are silenced."""

from __future__ import annotations

import logging
import os
import re
from typing import Any

from bridge.config.sinks import IdentitySettings
from bridge.errors import Misconfigured, Unavailable
from bridge.runtime.text import one_line, register_token
from bridge.runtime.threads import extend_deadline

# azure-identity waits for minutes and retries for minutes more; the caller retries anyway.
_LIMITS: dict[str, Any] = {"retry_total": 0, "connection_timeout": 2.0, "read_timeout": 5.0}
# The errors have no status: what IMDS and Microsoft Entra say when they do not answer, or want to be asked later.
_BUSY = re.compile(
    r"no response from the IMDS endpoint\.(?! Token)|\((?:unknown|temporarily_unavailable)\)|(?i:timed out|too many)"
)
TOKEN_SECONDS = 30.0  # for all that "default" tries, before the thread counts as stalled


class Tokens:
    """An identity's tokens for one scope, "" for none; the credential caches and renews them."""

    def __init__(self, settings: IdentitySettings, scope: str) -> None:
        self._settings, self._scope = settings, scope
        self._credential: Any = None

    def header(self) -> dict[str, str]:
        """Return the header with a token that has not expired.

        Raises:
            Unavailable: IMDS or Microsoft Entra did not answer, or asked to wait.
            Misconfigured: there is no identity, or no token of it for the scope.
        """
        if not self._scope:
            return {}
        extend_deadline(TOKEN_SECONDS)
        try:
            self._credential = self._credential or make_credential(self._settings)
            token = str(self._credential.get_token(self._scope).token)
        except Exception as error:  # the libraries raise more than their own errors
            text = (
                f"no token for the identity and {self._scope}; is one assigned to this VM, does IMDS answer, is the "
                f"scope right, and may the identity use that application? ({one_line(str(error))})"
            )
            kind = Unavailable if _BUSY.search(str(error)) else Misconfigured
            raise kind(text, is_unreached=True) from error
        register_token(token)
        return {"Authorization": f"Bearer {token}"}

    def forget(self) -> None:
        """Request a new token next time."""
        credential, self._credential = self._credential, None
        if credential is not None:
            credential.close()


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

    # IMDS is never asked through a proxy; workload identity does not ask IMDS and may need the proxy.
    may_use_proxy = "AZURE_FEDERATED_TOKEN_FILE" in os.environ
    client_id = settings.client_id or os.environ.get("AZURE_CLIENT_ID") or None
    return ManagedIdentityCredential(client_id=client_id, use_env_settings=may_use_proxy, **_LIMITS)


def quieten() -> None:
    """Silence the SDK's loggers: they repeat every failure, which we log once, and write tokens at debug level."""
    for name in ("azure", "azure.servicebus", "azure.identity", "msal"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
