"""Write events for Slack (Block Kit), and for receivers of Slack messages such as Discord's `/slack` address."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from operator import attrgetter
from typing import ClassVar, Literal

from bridge.config.sinks import Rate
from bridge.formats.digest import Digest, DigestFormat, DigestSettings
from bridge.formats.notice import Field, Notice, format_time
from bridge.runtime.json import Json
from bridge.runtime.text import length, truncate

# Discord's limit of `content`; Slack's is far higher.
TEXT_LENGTH = 2_000
# Block Kit reference: header, section, fields of a section, elements of a context.
HEADER_LENGTH = 150
SECTION_LENGTH = 3_000
FIELD_LENGTH = 2_000
FIELDS = 10
CONTEXT_ELEMENTS = 10

_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})
_LONGEST_ENTITY = 5
# A mention, the start of a link, `:skull:` (but not 14:03:25); a zero-width space after the character disarms it.
_ACTIVE = re.compile(r"@|:(?=//|[\w+'-]+:)(?!(?<=\d:)\d\d:\d\d)")
# Receivers read `text` as different kinds of markup, and the escape of one would be visible in another: characters
# that look alike have a meaning in none. An underscore between letters has none either, and names of scale sets
# contain it.
_LOOKALIKES = str.maketrans("&<>*~`|[]\\", "＆‹›∗∼ˋ¦［］＼")  # noqa: RUF001
_OUTER_UNDERSCORE = re.compile(r"(?<![^\W_])_|_(?![^\W_])")


class SlackSettings(DigestSettings):
    """Messages for a Slack incoming webhook, at the rate that it takes."""

    format: Literal["slack"]
    max_per_second: Rate | None = 1.0


class Slack(DigestFormat):
    """Blocks for Slack, and the whole message as `text` for notifications and for receivers without blocks."""

    settings: ClassVar = SlackSettings

    def write(self, event: Mapping[str, Json], now: datetime) -> Json:
        """Return the message."""
        message = self._notice(event, now)
        link = self._link(message.event_id)
        text = truncate(replace_markup(message.text), TEXT_LENGTH - len(link) - 1)
        return _message(f"{text}\n{link}".rstrip(), self._blocks(message, link, now))

    def write_lines(self, digest: Digest, count: int) -> Json:
        """Return a section for each line; as `text`, as many lines as fit."""
        lines = [(replace_markup(text), link) for text, link in digest.lines[:count]]
        sections = [f"{text} <{link}|console>" if link else text for text, link in lines]
        fleet = [replace_markup(text) for text in digest.fleet]
        blocks = [_section(_markup(text)) for text in (*fleet, *sections, *digest.more(count))]
        head = "\n".join([replace_markup(digest.headline), *fleet])
        texts = [head, *(f"{text} {link}".rstrip() for text, link in lines)]
        while length(text := "\n".join((*texts, *digest.more(len(texts) - 1)))) > TEXT_LENGTH:
            texts.pop()
        return _message(text, [_header(digest.headline), *blocks])

    def _blocks(self, message: Notice, link: str, now: datetime) -> Iterator[Json]:
        yield _header(message.headline)
        if message.sentences:
            yield _section(_plain_text("\n".join(message.sentences), SECTION_LENGTH))
        for is_code, group in groupby(message.fields, key=attrgetter("is_code")):
            fields = list(group)
            yield from map(_code, fields) if is_code else self._fields(fields, now)
        elements = [
            self._value(field, now, f"{field.label}: ") for field in message.details[: CONTEXT_ELEMENTS - 1]
        ]
        if link:
            elements.append(_markup(f"<{link}|Open in the console>"))
        yield {"type": "context", "elements": elements}

    def _fields(self, fields: Sequence[Field], now: datetime) -> Iterator[Json]:
        """Lay fields out with the label to the left of the value."""
        pairs = FIELDS // 2
        for start in range(0, len(fields), pairs):
            cells: list[Json] = []
            for field in fields[start : start + pairs]:
                cells += [_markup(f"*{field.label}*"), self._value(field, now)]
            yield {"type": "section", "fields": cells}

    def _value(self, field: Field, now: datetime, before: str = "") -> Json:
        if self._zone or not field.has_instant:
            return _plain_text(before + field.text, FIELD_LENGTH)
        parts = (_date(part, now) if isinstance(part, datetime) else part for part in field.parts)
        return _markup(before + "".join(parts))


def _message(text: str, blocks: Iterable[Json]) -> Json:
    return {"text": text, "blocks": [*blocks], "unfurl_links": False, "unfurl_media": False}


def _header(text: str) -> Json:
    return {"type": "header", "text": _plain_text(text, HEADER_LENGTH)}


def _section(text: Json) -> Json:
    return {"type": "section", "text": text}


def _date(instant: datetime, now: datetime) -> str:
    """Write an instant so that each reader sees their own time zone."""
    return f"<!date^{int(instant.timestamp())}^{{date_short_pretty}} {{time}}|{format_time(instant, now)}>"


def _code(field: Field) -> Json:
    return _section(_markup(f"*{field.label}*\n```{field.text}```"))


def _markup(text: str) -> Json:
    """Make a text object of texts that are not from outside, or whose markup is replaced."""
    return {"type": "mrkdwn", "text": text, "verbatim": True}


def _plain_text(text: str, max_length: int) -> Json:
    """Make a text object without markup, escaped as Slack requires."""
    escaped = _escaped(text)
    if length(escaped) > max_length:
        growth = length(escaped) - length(text)
        escaped = _escaped(truncate(text, max(max_length - growth, max_length // _LONGEST_ENTITY)))
    return {"type": "plain_text", "text": escaped, "emoji": True}


def _escaped(text: str) -> str:
    return _disarm(text.translate(_ENTITIES))


def replace_markup(text: str) -> str:
    """Replace what any receiver could read as markup, a mention or a link by characters that look alike."""
    return _disarm(_OUTER_UNDERSCORE.sub("＿", text.translate(_LOOKALIKES)))  # noqa: RUF001


def _disarm(text: str) -> str:
    return _ACTIVE.sub("\\g<0>\u200b", text)
