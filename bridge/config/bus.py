"""How Azure's services are reached: Service Bus to send and to receive, and Event Grid."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, Field

from bridge.config import values
from bridge.config.base import Fault, Secret, try_setting
from bridge.config.sinks import HttpSettings, IdentitySettings, SinkSettings


class BusSettings(IdentitySettings):
    """How to reach a Service Bus: a namespace with an identity, or a connection string."""

    namespace: str = ""
    """The host name of the namespace; its identity needs a role there. Example:
    `"contoso.servicebus.windows.net"`."""
    connection_string: Secret | None = None
    """A connection string, instead of `namespace`. Example:
    `"Endpoint=sb://contoso.servicebus.windows.net/;SharedAccessKeyName=forward;SharedAccessKey=..."`."""
    allow_http: bool = False
    """Whether AMQP without TLS to another machine is allowed, as `UseDevelopmentEmulator=true` asks for."""
    ca_file: Path | None = None
    """A PEM file of the only authorities that are trusted, for a broker with a certificate of its own. Example:
    `"ca.pem"`."""
    transport: Literal["amqp", "websocket"] = "amqp"
    """`websocket` uses port 443 instead of 5671, and needs `pip install 'imds-bridge[websocket]'`."""
    http_proxy: Annotated[Secret | None, values.check_proxy] = None
    """The HTTP proxy, only with `websocket`; it may contain user and password. Example:
    `"http://proxy.contoso.com:3128"`."""
    topic: str = ""
    """The topic; either this or `queue`. Example: `"scheduled-events"`."""
    queue: str = ""
    """The queue. Example: `"approvals"`."""

    @property
    def has_bus(self) -> bool:
        """Whether there is a bus at all; only settings that work without one may have none."""
        return True

    def find_faults(self) -> Iterator[Fault]:
        """Yield what is missing to reach a bus, or contradicts itself."""
        yield from super().find_faults()
        if not self.has_bus:
            return
        if bool(self.namespace) == (self.connection_string is not None):
            yield "", "give either namespace or connection_string (or connection_string_file)"
        if self.namespace and not values.HOST.fullmatch(self.namespace):
            yield "namespace", f"given {values.quote(self.namespace)}, expected NAME.servicebus.windows.net"
        if self.connection_string:
            text = self.connection_string.read()
            yield from try_setting("connection_string", partial(self.check_connection_string, text))
        if self.ca_file:
            yield from try_setting("ca_file", partial(values.check_ca, self.ca_file))
        if bool(self.topic) == bool(self.queue):
            yield "", "give either topic or queue"
        if self.http_proxy and self.transport != "websocket":
            yield "http_proxy", 'expected transport = "websocket", AMQP itself knows no proxy'

    def check_connection_string(self, text: str) -> None:
        """Refuse a connection string without an endpoint, or one that would be sent in plain text.

        Raises:
            ValueError: the reason.
        """
        endpoint = _endpoint(text)
        if "Endpoint=" not in text or endpoint is None:
            raise ValueError("expected Endpoint=sb://...;SharedAccessKeyName=...;SharedAccessKey=...")
        if is_plain(text) and not self.allow_http and not values.is_loopback(endpoint.hostname or ""):
            raise ValueError(
                "expected none with UseDevelopmentEmulator=true, which does without TLS; "
                "set allow_http = true to send without encryption"
            )

    @property
    def host(self) -> str:
        """The namespace's host, "" if the connection string cannot be read or has none."""
        if self.connection_string is None:
            return self.namespace
        with suppress(OSError, ValueError):
            endpoint = _endpoint(self.connection_string.read())
            return endpoint.netloc if endpoint else ""
        return ""

    @property
    def entity(self) -> str:
        """The topic's or queue's name."""
        return self.topic or self.queue

    @property
    def address(self) -> tuple[str, str]:
        """The namespace's host and the entity, so that the same place compares equal however it is written."""
        return self.host.lower().removesuffix(":5671"), self.entity.strip("/").lower()


def is_plain(connection_string: str) -> bool:
    """Return whether a connection string asks for AMQP without TLS."""
    return bool(re.search(r"(?i)(?:^|;)\s*UseDevelopmentEmulator\s*=\s*true\s*(?:;|$)", connection_string))


def _endpoint(connection_string: str) -> SplitResult | None:
    found = re.search(r"(?i)(?:^|;)\s*Endpoint=([^;]+)", connection_string)
    return urlsplit(found[1].strip()) if found else None


class ReceiverSettings(BusSettings):
    """What is received from: a queue, or a topic's subscription."""

    subscription: str = ""
    """The subscription of the topic. Example: `"chat"`."""

    def find_faults(self) -> Iterator[Fault]:
        """Yield a topic without its subscription as well."""
        yield from super().find_faults()
        if bool(self.topic) != bool(self.subscription):
            yield "", "a topic needs a subscription, and a subscription a topic"

    def find_loops(self, section: str, sinks: Mapping[str, SinkSettings]) -> Iterator[Fault]:
        """Yield the sinks whose events a section with these settings would receive."""
        for name, sink in sinks.items():
            if isinstance(sink, ServiceBusSettings) and sink.address == self.address:
                yield (
                    f"sinks.{name}.{'topic' if sink.topic else 'queue'}",
                    f"given {values.quote(sink.entity)}, the entity that [{section}] receives from; "
                    "expected another one: it would receive each event that is sent there",
                )


class RelaySettings(ReceiverSettings):
    """Where `imds-bridge relay` receives events from, for its sinks."""


_PLACEHOLDERS = ("event", "vm", "resource_group", "type")


class ServiceBusSettings(SinkSettings, BusSettings):
    """Send each event to a Service Bus topic or queue."""

    kind: Literal["servicebus"]
    session: Annotated[str, AfterValidator(partial(values.check_template, names=_PLACEHOLDERS))] = ""
    """The session id of each message, for entities that require sessions; it may contain `{event}`, `{vm}`,
    `{resource_group}` and `{type}`; above 128 characters, it ends with a hash. Example: `"{event}"`."""
    timeout_seconds: float = Field(default=10.0, gt=0, le=120)
    """How long one send may take. Example: `5`."""
    drops_copies: ClassVar = True  # by duplicate detection

    @property
    def signing_secrets(self) -> Secret | None:
        """What messages are signed with, as in Standard Webhooks; None for no signature."""
        return self._signing_secrets


_TOPIC = re.compile(r"[A-Za-z0-9-]{3,50}")

CUSTOM_API_VERSION = "2018-01-01"

NAMESPACE_API_VERSION = "2024-06-01"


class EventGridSettings(SinkSettings, HttpSettings, IdentitySettings):
    """Send the events to an Event Grid topic, custom or of a namespace or a domain, with a key or the identity."""

    kind: Literal["eventgrid"]
    endpoint: str
    """The URL of a custom topic or a domain as the portal shows it, or the address of a namespace. Example:
    `"https://maintenance.westeurope-1.eventgrid.azure.net/api/events"`."""
    flavor: Literal["custom", "namespace"] | None = None
    """The kind of topic, where `endpoint` does not show it."""
    topic: str = ""
    """The topic of a namespace or a domain; a domain gets its name as the `source` of the events. Example:
    `"maintenance"`."""
    key: Annotated[Secret | None, values.check_token] = None
    """An access key; without one, the managed identity is used. Example: `"9Q3...="`."""

    def find_faults(self) -> Iterator[Fault]:
        """Yield an endpoint that is no topic's."""
        yield from super().find_faults()
        for key, text in try_setting("endpoint", self.publish_url):
            yield key, f"given {values.quote(self.endpoint)}, {text}"

    def publish_url(self) -> tuple[str, str]:
        """Return the flavor and the URL to post batches to.

        Raises:
            ValueError: the endpoint is no URL that is allowed, or does not say which kind of topic it is.
        """
        parts = urlsplit(values.check_url(self.endpoint, allow_http=self.allow_http))
        path = parts.path.rstrip("/")
        named = re.fullmatch(r"/topics/([^/:]+)(:publish)?", path)
        flavor = self.flavor or (
            "custom" if path == "/api/events" else "namespace" if self.topic or named else ""
        )
        is_topic = not self.topic or _TOPIC.fullmatch(self.topic)
        if flavor == "custom" and path in ("", "/api/events") and is_topic:
            return flavor, f"{parts.scheme}://{parts.netloc}/api/events?api-version={CUSTOM_API_VERSION}"
        topic = self.topic or (named[1] if named else "")
        if flavor == "namespace" and _TOPIC.fullmatch(topic) and (named or not path):
            query = f"api-version={NAMESPACE_API_VERSION}"
            return flavor, f"{parts.scheme}://{parts.netloc}/topics/{topic}:publish?{query}"
        raise ValueError(
            "expected https://TOPIC.REGION-1.eventgrid.azure.net/api/events (a custom topic, or a domain with "
            'topic = "..."), or https://NAMESPACE.REGION-1.eventgrid.azure.net with topic = "..."'
        )
