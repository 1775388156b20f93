"""The settings of an Event Grid topic."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar, Literal
from urllib.parse import urlsplit

from bridge.config.base import Fault, Secret, try_setting
from bridge.config.bus import IdentitySettings
from bridge.config.http import HttpSettings
from bridge.config.sinks import SinkSettings
from bridge.config.validators import (
    check_token,
    check_url,
    quote,
)

_TOPIC = re.compile(r"[A-Za-z0-9-]{3,50}")

CUSTOM_API_VERSION = "2018-01-01"

NAMESPACE_API_VERSION = "2024-06-01"


class EventGridSettings(SinkSettings, HttpSettings, IdentitySettings):
    """Send the events to an Event Grid topic, custom or of a namespace, with a key or the identity."""

    kind: Literal["eventgrid"]
    endpoint: str
    """The URL of a custom topic as the portal shows it, or the address of a namespace. Example:
    `"https://maintenance.westeurope-1.eventgrid.azure.net/api/events"`."""
    flavor: Literal["custom", "namespace"] | None = None
    """The kind of topic, where `endpoint` does not show it."""
    topic: str = ""
    """The topic of a namespace. Example: `"maintenance"`."""
    key: Secret | None = None
    """An access key; without one, the managed identity is used. Example: `"9Q3...="`."""
    secret_checks: ClassVar = {**HttpSettings.secret_checks, "key": check_token}

    def find_faults(self) -> Iterator[Fault]:
        """Yield an endpoint that is no topic's."""
        yield from super().find_faults()
        for key, text in try_setting("endpoint", self._check_endpoint):
            yield key, f"given {quote(self.endpoint)}, {text}"

    def _check_endpoint(self) -> None:
        check_url(self.endpoint, allow_http=self.allow_http)
        self.publish_url()

    def publish_url(self) -> tuple[str, str]:
        """Return the flavor and the URL to post batches to.

        Raises:
            ValueError: the endpoint does not say which kind of topic it is.
        """
        parts = urlsplit(self.endpoint)
        path = parts.path.rstrip("/")
        named = re.fullmatch(r"/topics/([^/:]+)(:publish)?", path)
        flavor = self.flavor or (
            "namespace" if self.topic or named else "custom" if path == "/api/events" else ""
        )
        if flavor == "custom" and path in ("", "/api/events") and not self.topic:
            return flavor, f"{parts.scheme}://{parts.netloc}/api/events?api-version={CUSTOM_API_VERSION}"
        topic = self.topic or (named[1] if named else "")
        if flavor == "namespace" and _TOPIC.fullmatch(topic) and (named or not path):
            query = f"api-version={NAMESPACE_API_VERSION}"
            return flavor, f"{parts.scheme}://{parts.netloc}/topics/{topic}:publish?{query}"
        if self.topic and path:
            raise ValueError(
                "a custom topic's; leave topic out, or give a namespace's address without a path"
            )
        raise ValueError(
            "expected https://TOPIC.REGION-1.eventgrid.azure.net/api/events (a custom topic), or "
            'https://NAMESPACE.REGION-1.eventgrid.azure.net with topic = "..."'
        )
