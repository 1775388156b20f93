"""How Service Bus is reached: to send, and to receive."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Literal
from urllib.parse import SplitResult, urlsplit

from bridge.config.base import Fault, Secret, Settings, try_setting
from bridge.config.validators import (
    HOST,
    check_url,
    is_loopback,
    quote,
)


class IdentitySettings(Settings):
    """Who this process is to Azure."""

    credential: Literal["managed_identity", "default"] = "managed_identity"
    """`managed_identity` of the VM, or `default`, which tries the environment, workload identity, managed identity
    and developer tools in turn."""
    client_id: str = ""
    """The client id of a user-assigned managed identity. Example: `"11111111-2222-3333-4444-555555555555"`."""


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
    transport: Literal["amqp", "websocket"] = "amqp"
    """`websocket` uses port 443 instead of 5671, and needs `pip install 'imds-bridge[websocket]'`."""
    http_proxy: str = ""
    """The HTTP proxy, only with `websocket`. Example: `"http://proxy.contoso.com:3128"`."""
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
        if self.namespace and not HOST.fullmatch(self.namespace):
            yield "namespace", f"given {quote(self.namespace)}, expected NAME.servicebus.windows.net"
        if self.connection_string:
            text = self.connection_string.read()
            yield from try_setting("connection_string", partial(self.check_connection_string, text))
        if bool(self.topic) == bool(self.queue):
            yield "", "give either topic or queue"
        if self.http_proxy:
            if self.transport != "websocket":
                yield "http_proxy", 'expected transport = "websocket", AMQP itself knows no proxy'
            yield from try_setting("http_proxy", partial(check_url, self.http_proxy, allow_http=True))

    def check_connection_string(self, text: str) -> None:
        """Refuse a connection string without an endpoint, or one that would be sent in plain text.

        Raises:
            ValueError: the reason.
        """
        endpoint = _endpoint(text)
        if "Endpoint=" not in text or endpoint is None:
            raise ValueError("expected Endpoint=sb://...;SharedAccessKeyName=...;SharedAccessKey=...")
        is_plain = re.search(r"(?i)(?:^|;)\s*UseDevelopmentEmulator\s*=\s*true\s*(?:;|$)", text)
        if is_plain and not self.allow_http and not is_loopback(endpoint.hostname or ""):
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


class RelaySettings(ReceiverSettings):
    """Where `imds-bridge relay` receives events from, for its sinks."""
