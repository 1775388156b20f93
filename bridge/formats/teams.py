"""Write events for Microsoft Teams: an Adaptive Card 1.4 for a Workflow that receives webhook requests."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import ClassVar, Literal

from bridge.config.sinks import Rate
from bridge.formats.base import encode_json
from bridge.formats.digest import Digest, DigestFormat, DigestSettings
from bridge.formats.notice import Field, Notice, Tone
from bridge.runtime.json import Json
from bridge.runtime.text import truncate

# Teams: about 28 KB a message, counted as it is sent.
MESSAGE_BYTES = 28_000
CONTENT_TYPE = "application/vnd.microsoft.card.adaptive"

_TEXT_LENGTH = 1_000
# Even if every character of a text takes six bytes, twenty texts of this length fit.
_SHORT_TEXT_LENGTH = 150
# `{{DATE(...)}}` is evaluated in every text of a card, `<at>` makes a mention.
_ACTIVE = re.compile(r"\{(?=\{)|<(?=/?at)", re.IGNORECASE)


class TeamsSettings(DigestSettings):
    """Adaptive Cards for a Teams workflow, at the rate that it takes."""

    format: Literal["teams"]
    max_per_second: Rate | None = 4.0


class Teams(DigestFormat):
    """A card whose texts from outside are in text runs, which have no Markdown."""

    settings: ClassVar = TeamsSettings

    def write(self, event: Mapping[str, Json], now: datetime) -> Json:
        """Return the message."""
        message = self._notice(event, now)
        card = self._card(message, _TEXT_LENGTH)
        return card if len(encode_json(card)) <= MESSAGE_BYTES else self._card(message, _SHORT_TEXT_LENGTH)

    def write_lines(self, digest: Digest, count: int) -> Json:
        """Return a card with a run for each line, which links to its event."""
        lines = [_line(_run(text, **_opens(link))) for text, link in digest.lines[:count]]
        more = [_line(_run(text, isSubtle=True)) for text in digest.more(count)]
        return _message(digest.tone, digest.headline, digest.fleet, [*lines, *more])

    def _card(self, message: Notice, max_length: int) -> Json:
        lines = [self._field(field, max_length) for field in message.fields]
        small = [self._field(field, max_length, isSubtle=True, size="Small") for field in message.details]
        if link := self._link(message.event_id):
            small.append(_line(_run("Open in the console", **_opens(link))))
        body = [*lines, {"type": "Container", "separator": True, "items": small}]
        return _message(message.tone, message.headline, message.sentences, body)

    def _field(self, field: Field, max_length: int, **style: Json) -> Json:
        if field.has_instant and not self._zone:
            text = "".join(_date(part) if isinstance(part, datetime) else part for part in field.parts)
            shown = f"**{field.label}:** {text}"
            return {"type": "TextBlock", "text": shown, "wrap": True, "spacing": "Small", **style}
        code = {"fontType": "Monospace"} if field.is_code else {}
        label = _run(f"{field.label}: ", weight="Bolder", **style)
        value = _run(truncate(field.text, max_length), **code, **style)
        return _line(label, value)


def _message(tone: Tone, headline: str, sentences: Sequence[str], body: Sequence[Json]) -> Json:
    title = {"type": "RichTextBlock", "inlines": [_run(headline, size="Medium", weight="Bolder")]}
    head = [title, *(_line(_run(sentence)) for sentence in sentences)]
    card = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "msteams": {"width": "Full"},
        "body": [{"type": "Container", "style": tone, "bleed": True, "items": head}, *body],
    }
    attachment = {"contentType": CONTENT_TYPE, "contentUrl": None, "content": card}
    return {"type": "message", "attachments": [attachment]}


def _line(*runs: Json) -> Json:
    return {"type": "RichTextBlock", "inlines": [*runs], "spacing": "Small"}


def _opens(link: str) -> dict[str, Json]:
    """Return what makes a run a link, nothing without one."""
    return {"selectAction": {"type": "Action.OpenUrl", "url": link}} if link else {}


def _run(text: str, **style: Json) -> Json:
    return {"type": "TextRun", "text": _ACTIVE.sub("\\g<0>\u200b", text), **style}


def _date(instant: datetime) -> str:
    """Write an instant so that each reader sees their own time zone; the functions take no fractions of a second."""
    text = f"{instant:%Y-%m-%dT%H:%M:%SZ}"
    return f"{{{{DATE({text}, SHORT)}}}} {{{{TIME({text})}}}}"
