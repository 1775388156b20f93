"""The border to Service Bus: clients from settings, and the SDK's errors mapped once."""

from __future__ import annotations

import logging
from typing import Any
from urllib.parse import urlsplit

from azure.core.exceptions import AzureError
from azure.servicebus import ServiceBusClient, TransportType
from azure.servicebus import exceptions as sdk

from bridge.config import BusSettings
from bridge.errors import DeliveryError, Misconfigured, Rejected, Unavailable
from bridge.logs import hide, redact

# Its own retries would only delay ours: a wrong key takes 15 s by default.
RETRY_TOTAL = 0
TRY_SECONDS = 10.0

# The service closes a link that carried nothing for ten minutes (azure-sdk-for-python 10127).
IDLE_LIMIT_SECONDS = 240.0

_MAPPED: tuple[tuple[type[BaseException], type[DeliveryError], str], ...] = (
    (sdk.MessageSizeExceededError, Rejected, "the event is too large for the entity"),
    (
        sdk.MessagingEntityNotFoundError,
        Misconfigured,
        "there is no such queue or topic; it is tried until there is",
    ),
    (sdk.MessagingEntityDisabledError, Misconfigured, "the queue or topic is disabled"),
    (sdk.ServiceBusAuthenticationError, Misconfigured, "the key or identity is refused"),
    (
        sdk.ServiceBusAuthorizationError,
        Misconfigured,
        "the identity lacks the role (it may take minutes to arrive)",
    ),
    (sdk.ServiceBusQuotaExceededError, Unavailable, "the entity is full"),
    (sdk.ServiceBusServerBusyError, Unavailable, "the service is busy"),
    (sdk.OperationTimeoutError, Unavailable, "no answer in time"),
    (AzureError, Unavailable, "the connection failed"),
)

for _name in ("azure", "azure.servicebus", "azure.identity"):  # our own lines say what is wrong, once
    logging.getLogger(_name).setLevel(logging.CRITICAL)


def connect(settings: BusSettings) -> ServiceBusClient:
    """Make a client; it connects only when a sender or receiver is opened.

    Raises:
        Misconfigured: the connection string or the WebSocket package is missing.
    """
    options: dict[str, Any] = {
        "retry_total": RETRY_TOTAL,
        "try_timeout": TRY_SECONDS,
        "transport_type": (
            TransportType.AmqpOverWebsocket if settings.transport == "websocket" else TransportType.Amqp
        ),
    }
    if settings.http_proxy:
        proxy = urlsplit(settings.http_proxy)
        options["http_proxy"] = {"proxy_hostname": proxy.hostname, "proxy_port": proxy.port or 8080}
    try:
        if settings.connection_string:
            text = settings.connection_string.read()
            hide(text)
            hide(text.partition("SharedAccessKey=")[2].partition(";")[0])
            return ServiceBusClient.from_connection_string(text, **options)
        return ServiceBusClient(settings.namespace, _credential(settings), **options)
    except (ValueError, OSError) as error:
        raise Misconfigured(f"{where(settings)}: {redact(str(error))}") from None


def _credential(settings: BusSettings) -> Any:
    if settings.credential == "default":
        from azure.identity import DefaultAzureCredential  # noqa: PLC0415 - 42 MiB that a key does not need

        return DefaultAzureCredential()
    from azure.identity import ManagedIdentityCredential  # noqa: PLC0415

    return ManagedIdentityCredential(client_id=settings.client_id or None)


def where(settings: BusSettings) -> str:
    """Name namespace and entity for messages, without any key."""
    namespace = settings.namespace or "Service Bus"
    if settings.connection_string:
        try:
            parts = dict(part.partition("=")[::2] for part in settings.connection_string.read().split(";"))
            namespace = urlsplit(parts.get("Endpoint", "")).netloc or namespace
        except (OSError, ValueError):
            pass
    return f"{namespace}/{settings.entity}"


def delivery_error(error: BaseException, place: str, *, delivered: int = 0) -> DeliveryError:
    """Say what an SDK's error means for a delivery."""
    kind, advice = next(
        ((kind, advice) for foreign, kind, advice in _MAPPED if isinstance(error, foreign)),
        (Unavailable, "the SDK failed"),
    )
    detail = redact(" ".join(str(error).split()))[:300]
    return kind(f"{place}: {advice} ({type(error).__name__}: {detail})", delivered=delivered)
