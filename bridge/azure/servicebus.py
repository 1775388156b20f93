"""The border to Service Bus: clients from settings, and the SDK's errors mapped once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from azure.core.exceptions import AzureError, ClientAuthenticationError
from azure.servicebus import ServiceBusClient, ServiceBusSender, TransportType
from azure.servicebus import exceptions as sdk

from bridge.azure import credentials
from bridge.azure.internals import TransferRefusedError, adapt_sdk
from bridge.config.base import Secret
from bridge.config.bus import BusSettings, is_plain
from bridge.config.values import UNTRUSTED, UNTRUSTED_MARKS, check_proxy
from bridge.errors import BridgeError, DeliveryError, Misconfigured, Rejected, Unavailable
from bridge.runtime.text import one_line, redact, register_secret

S = TypeVar("S", bound=BusSettings)

# The SDK's own retries would only delay ours: a wrong key takes 15 s by default.
RETRY_TOTAL = 0
TRY_SECONDS = 10.0

# The service closes a link that carried nothing for ten minutes (azure-sdk-for-python 10127), and a firewall or
# NAT gateway may drop an idle connection after four.
IDLE_LIMIT_SECONDS = 200.0

_MAPPED: tuple[tuple[type[BaseException], type[DeliveryError], str], ...] = (
    (sdk.MessageSizeExceededError, Rejected, "the event is too large for the entity"),
    (sdk.MessagingEntityNotFoundError, Misconfigured, "there is no such queue or topic"),
    (sdk.MessagingEntityDisabledError, Misconfigured, "the queue or topic is disabled"),
    (sdk.ServiceBusAuthenticationError, Misconfigured, "the key or identity is refused"),
    (
        sdk.ServiceBusAuthorizationError,
        Misconfigured,
        "the identity lacks the role (it may take minutes to arrive)",
    ),
    (
        ClientAuthenticationError,
        Misconfigured,
        "no token for the identity; is one assigned to this VM, and does IMDS answer?",
    ),
    (sdk.ServiceBusQuotaExceededError, Unavailable, "the entity is full"),
    (sdk.ServiceBusServerBusyError, Unavailable, "the service is busy"),
    (sdk.OperationTimeoutError, Unavailable, "no answer in time"),
    (TransferRefusedError, Misconfigured, "the entity refuses what was sent"),
    (AzureError, Unavailable, "the connection failed"),
    (ValueError, Misconfigured, "the settings do not fit"),
    (ImportError, Misconfigured, 'transport = "websocket" needs its package: install imds-bridge[websocket]'),
)

_REQUIRED = "the queue or subscription requires sessions"
_NO_CONNECTION = "ConnectionsQuotaExceeded"
# By what the service says: the SDK has no class of errors for it.
_BY_TEXT: tuple[tuple[str, type[DeliveryError], str], ...] = (
    (
        _NO_CONNECTION,
        Unavailable,
        "the namespace has no connection left (it accepts 5,000); close other clients, or use more namespaces",
    ),
    ("Failed to authenticate the connection due", Unavailable, "the host name cannot be resolved"),
    ("prevented to connect", Misconfigured, "the namespace's firewall refuses this machine"),
    ("proxy status: 407", Misconfigured, "the proxy wants user and password, or other ones, in http_proxy"),
    *((mark, Misconfigured, UNTRUSTED) for mark in UNTRUSTED_MARKS),
    ("non-sessionful", Misconfigured, _REQUIRED),
    ("SessionId was not set", Misconfigured, _REQUIRED),
    ("sessionful", Misconfigured, "the queue or subscription has no sessions"),
)

# The broker refuses one transfer with these; the link stays usable.
_REFUSALS = (sdk.MessageSizeExceededError, sdk.ServiceBusQuotaExceededError, sdk.ServiceBusServerBusyError)


def connect(settings: BusSettings, *, credential: Any = None) -> ServiceBusClient:
    """Make a client; it connects only when a sender or receiver is opened.

    Args:
        settings: the namespace, the credentials and the transport.
        credential: one from `make_credential` to use again; None to make one if the settings need it.

    Raises:
        Misconfigured: the connection string cannot be used.
    """
    credentials.quieten()
    adapt_sdk()
    options: dict[str, Any] = {
        "retry_total": RETRY_TOTAL,
        "try_timeout": TRY_SECONDS,
        "transport_type": (
            TransportType.AmqpOverWebsocket if settings.transport == "websocket" else TransportType.Amqp
        ),
    }
    if settings.ca_file:
        options["connection_verify"] = str(settings.ca_file)
    try:
        if settings.http_proxy:
            proxy = urlsplit(check_proxy(settings.http_proxy.read()))
            login = {"username": unquote(proxy.username or ""), "password": unquote(proxy.password or "")}
            register_secret(login["password"])
            place = {"proxy_hostname": proxy.hostname, "proxy_port": proxy.port or 80}
            options["http_proxy"] = {**place, **login}
        if settings.connection_string:
            text = settings.connection_string.read()
            _register_secrets(text)
            settings.check_connection_string(text)  # its file may have changed since the start
            if not is_plain(text) and ":" in settings.host:
                options["custom_endpoint_address"] = f"sb://{settings.host}"  # for its port: the SDK drops it
            return ServiceBusClient.from_connection_string(text, **options)
        return ServiceBusClient(settings.namespace, credential or make_credential(settings), **options)
    except (ValueError, OSError) as error:
        raise Misconfigured(f"{address_of(settings)}: {redact(str(error))}") from None


def sender_of(client: ServiceBusClient, settings: BusSettings) -> ServiceBusSender:
    """Return a sender to the topic or the queue."""
    get = client.get_topic_sender if settings.topic else client.get_queue_sender
    return get(settings.entity)


def make_credential(settings: BusSettings) -> Any:
    """Make the credential that the settings ask for; None if they have a connection string."""
    return None if settings.connection_string else credentials.make_credential(settings)


def with_current_secret(settings: S) -> S:
    """Return the settings with the connection string read again.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    if settings.connection_string is None:
        return settings
    text = settings.connection_string.read()
    _register_secrets(text)
    return settings.model_copy(update={"connection_string": Secret(text)})


def address_of(settings: BusSettings) -> str:
    """Name namespace and entity for messages, without any key."""
    return f"{settings.host or 'Service Bus'}/{settings.entity}"


def link_is_intact(error: BaseException) -> bool:
    """Return whether the link can be used again: the broker only refused what was sent."""
    return isinstance(error, (TransferRefusedError, *_REFUSALS)) and _NO_CONNECTION not in str(error)


@contextmanager
def mapped_errors(place: str) -> Iterator[None]:
    """Raise what the SDK raises as a DeliveryError; `place` is named in its text.

    Raises:
        DeliveryError: as it came, or as delivery_error maps it.
    """
    try:
        yield
    except BridgeError:
        raise
    except Exception as error:
        raise delivery_error(error, place) from error


def delivery_error(error: BaseException, place: str) -> DeliveryError:
    """Map an error of the SDK to the project's own.

    Args:
        error: what the SDK raised.
        place: namespace and entity, for the message.
    """
    inner = getattr(error, "inner_exception", None)  # the SDK wraps what azure-identity raises
    if isinstance(inner, ClientAuthenticationError):
        error = inner
    detail = one_line(str(error))
    by_text = ((kind, advice) for text, kind, advice in _BY_TEXT if text in str(error))
    by_class = ((kind, advice) for foreign, kind, advice in _MAPPED if isinstance(error, foreign))
    kind, advice = next(chain(by_text, by_class), (Unavailable, "the SDK failed"))
    return kind(
        f"{place}: {advice} ({type(error).__name__}: {detail})",
        is_unreached=kind is Unavailable and link_is_intact(error),
    )


def _register_secrets(connection_string: str) -> None:
    pairs = (part.partition("=")[::2] for part in connection_string.split(";"))
    parts = {name.strip().lower(): value.strip() for name, value in pairs}
    for secret in (connection_string, parts.get("sharedaccesskey"), parts.get("sharedaccesssignature")):
        if secret:
            register_secret(secret)
