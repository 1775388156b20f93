"""Send messages for people by one of the services that the library apprise knows: mail and many chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from bridge.config.base import Secret, read_or_keep
from bridge.config.sinks import ChatSettings, Rate, SinkSettings
from bridge.errors import Misconfigured, Unavailable
from bridge.events.model import StoredEvent
from bridge.formats.notice import notice
from bridge.formats.slack import replace_markup
from bridge.http.client import register_url
from bridge.runtime.text import one_line
from bridge.runtime.time import Clock
from bridge.sinks.base import Inconclusive, RequestPreview, Sink


class AppriseSettings(ChatSettings, SinkSettings):
    """Send messages by any service that the library apprise knows, such as mail; needs `imds-bridge[apprise]`."""

    kind: Literal["apprise"]
    url: Secret
    """The URL of the service with one target, as apprise documents it; another one needs a sink of its own. Example:
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
        self._service = self._read_service()

    def reload(self) -> None:
        """Read the URL again."""
        self._service = read_or_keep(self._read_service, self._service)

    def send(self, events: Sequence[StoredEvent]) -> None:
        """Send the event as a message."""
        result = self._service.notify(**self._message(events[0]), body_format="text")
        if not result:
            self.reload()  # most services do not say whether it was the credentials
            said = "; ".join(entry.message for entry in result.logs())
            kind = Misconfigured if any(f"error={code}" in said for code in (401, 403, 404)) else Unavailable
            raise kind(f"apprise could not send: {one_line(said)}")

    def check_format(self, _: Sequence[StoredEvent]) -> None:
        """Do nothing: any event can be written."""

    def check(self) -> str:
        """Say that nothing can be tested without sending."""
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
        for form in (url, url.replace(":", "/").replace("@", "/")):  # a token may stand for the host, too
            register_url(form)
        # In this thread: each service has time limits of its own, of 4 to 15 s for a request.
        service = apprise.Apprise(asset=apprise.AppriseAsset(async_mode=False, service_timeout=0))
        if not service.add(url) or len(service) != 1:
            raise ValueError("url: expected one URL of a service that apprise knows, with all that it needs")
        if (targets := len(service[0])) > 1:
            # If one of them failed, the others would get the message again with each retry.
            raise ValueError(f"url: given {targets} targets, expected one: use a sink for each")
        return service
