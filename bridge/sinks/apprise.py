"""Send messages for people by one of the services that the library apprise knows: mail and many chats."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal
from urllib.parse import unquote

from bridge.config.base import Secret, read_or_keep
from bridge.config.sinks import ChatSettings, Rate, SinkSettings
from bridge.errors import DeliveryError, HungError, Misconfigured, Rejected, Unavailable
from bridge.events.model import StoredEvent
from bridge.formats.notice import notice
from bridge.formats.slack import replace_markup
from bridge.http.client import register_url
from bridge.runtime.text import one_line, register_secret
from bridge.runtime.time import Clock
from bridge.runtime.worker import Worker
from bridge.sinks.base import Inconclusive, RequestPreview, Sink

# What a service may take for one target, with logins and beyond its time limits for single requests.
TARGET_SECONDS = 60.0
_SETUP_ERROR = re.compile("error=(?:30[12378]|40[134])")


class AppriseSettings(ChatSettings, SinkSettings):
    """Send messages by any service that the library apprise knows, such as mail; needs `imds-bridge[apprise]`."""

    kind: Literal["apprise"]
    url: Secret
    """The URL of the service with one target, as apprise documents it; a sink for each target. Example:
    `"mailtos://user:password@example.org?to=ops@example.org"`."""
    max_per_second: Rate | None = 1.0


class AppriseSink(Sink):
    """One service of apprise."""

    def __init__(self, settings: AppriseSettings, *, clock: Clock | None = None) -> None:
        """Prepare to send.

        Raises:
            OSError, ValueError: the package is missing, or the URL cannot be used.
        """
        self._settings = settings
        self._clock = clock or Clock()
        self._worker = Worker("apprise")
        self._service = self._read_service()

    def reload(self) -> None:
        """Read the URL again."""
        self._service = read_or_keep(self._read_service, self._service)

    @property
    def _targets(self) -> int:
        service = self._service[0]
        return int(len(service) // (1 + service.retry))  # it counts each target with its own retries

    @property
    def outdated(self) -> str:
        """Say that there are several targets."""
        if self._targets == 1:
            return ""
        # If one of them failed, the others would get a message again with each retry.
        given = f"url: given {self._targets} targets, expected one: use a sink for each"
        return f"{given}; until then, each event is tried once"

    def send(self, events: Sequence[StoredEvent]) -> None:
        """Send the event as a message."""
        message = self._message(events[0])
        limit_seconds = len(self._service[0]) * (TARGET_SECONDS + sum(self._service[0].request_timeout))
        try:
            result = self._worker.call(
                partial(self._service.notify, **message, body_format="text"), limit_seconds=limit_seconds
            )
        except HungError as error:
            if error.final:
                raise
            raise self._failure(Unavailable, str(error)) from error
        if not result:
            said = "; ".join(entry.message for entry in result.logs())
            kind = Misconfigured if _SETUP_ERROR.search(said) else Unavailable
            raise self._failure(kind, f"apprise could not send: {one_line(said)}")

    def _failure(self, kind: type[DeliveryError], text: str) -> DeliveryError:
        error = Rejected(f"{text}; {self.outdated}") if self.outdated else kind(text)
        self.reload()  # most services do not say whether it was the credentials
        return error

    def check(self) -> str:
        """Say that nothing can be tested without sending, but for the number of targets."""
        if self.outdated:
            raise Misconfigured(self.outdated)
        raise Inconclusive("apprise knows the service of the URL")

    def preview(self, event: StoredEvent) -> RequestPreview:
        """Return the title and the body."""
        message = self._message(event)
        return RequestPreview(head=(f"title: {message['title']}",), body=message["body"].encode())

    def _message(self, event: StoredEvent) -> dict[str, str]:
        """Return what apprise sends for an event, as text that no service can take for markup."""
        settings, now = self._settings, self._clock.now()
        message = notice(event.envelope, now=now, zone=settings.zone, tags=settings.show_tags)
        title, *lines = replace_markup(message.text).split("\n")
        body = "\n".join([*lines, settings.link(message.event_id)]).strip()
        return {"title": title, "body": body}

    def _read_service(self) -> Any:
        try:
            import apprise  # noqa: PLC0415 - 17 MiB, and an extra
        except ImportError:
            raise ValueError('kind = "apprise" needs its package: install imds-bridge[apprise]') from None
        url = self._settings.url.read()
        user = re.sub("^[^:]*://|[/?#].*", "", url).rpartition("@")[0]
        for form in (url, url.replace(":", "/").replace("@", "/")):  # a token may stand for the host, too
            register_url(form)
        for part in re.split("[:@]", user):
            register_secret(part)
            register_secret(unquote(part))
        if "@" in user:
            raise ValueError(
                "url: given two @ before the path, expected one: write %40 for an @ of a user or a password"
            )
        # Without apprise's threads: each service has time limits of its own, of 4 to 15 s for a request.
        service = apprise.Apprise(asset=apprise.AppriseAsset(async_mode=False, service_timeout=0))
        if not service.add(url) or len(service) != 1:
            raise ValueError("url: expected one URL of a service that apprise knows, with all that it needs")
        service[0].redirects = False  # headers with secrets would go along
        return service
