"""Show an event in Slack (Block Kit), and in what takes Slack's messages, such as Discord's `/slack` address."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from operator import attrgetter
from typing import ClassVar, Literal

from bridge.formats.base import ChatFormat, ChatSettings
from bridge.formats.notice import Notice, notice
from bridge.formats.text import Fact, Moment, cut, length
from bridge.runtime.json import Json

# Discord's limit of `content`; Slack's own is far above it.
TEXT_LENGTH = 2_000
# Block Kit reference: header, section, fields of a section, elements of a context.
HEADER_LENGTH = 150
SECTION_LENGTH = 3_000
FIELD_LENGTH = 2_000
FIELDS = 10
CONTEXT_ELEMENTS = 10

_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})
_LONGEST_ENTITY = 5
# A mention, the beginning of a link, `:skull:` (but no 14:03:25); a zero-width space behind the sign leaves its look.
_ACTIVE = re.compile(r"@|:(?=//|[\w+'-]+:)(?!(?<=\d:)\d\d:\d\d)", re.ASCII)
# `text` is read by several kinds of markup, and an escape of one would show in another: signs that look alike act
# in none of them. An underscore between letters acts in none either, and stands in the names of scale sets.
_LOOKALIKES = str.maketrans("&<>*~`|[]\\", "＆‹›∗∼ˋ¦［］＼")  # noqa: RUF001
_OUTER_UNDERSCORE = re.compile(r"(?<![^\W_])_|_(?![^\W_])")


# What Slack answers to every message because of the webhook's own state.
_SETUP_ERRORS = frozenset(
    b"action_prohibited channel_is_archived channel_not_found invalid_token no_active_hooks no_service no_service_id "
    b"no_team posting_to_general_channel_denied team_disabled user_not_found".split()
)
# Discord: the channel is a forum, so that the URL needs a thread.
_NEEDS_THREAD = re.compile(rb'"code"\s*:\s*"?220001\b')


class SlackSettings(ChatSettings):
    """Messages for a Slack incoming webhook, at the rate that it takes."""

    format: Literal["slack"]
    max_per_second: float | None = 1.0


class Slack(ChatFormat):
    """Blocks for Slack, and the whole as `text` for notifications and for receivers that know no blocks."""

    settings: ClassVar = SlackSettings

    def __init__(self, settings: ChatSettings) -> None:
        self._zone = settings.zone

    @staticmethod
    def is_setup_error(body: bytes) -> bool:
        """Recognise a webhook or a channel that takes nothing any more, and a Discord URL without its thread."""
        return body.strip() in _SETUP_ERRORS or _NEEDS_THREAD.search(body) is not None

    def write(self, event: Mapping[str, Json], now: datetime) -> Json:
        """Return the message."""
        said = notice(event, now=now, zone=self._zone)
        return {
            "text": cut(_signs(said.text), TEXT_LENGTH),
            "blocks": list(self._blocks(said, Moment(now=now))),
            "unfurl_links": False,
            "unfurl_media": False,
        }

    def _blocks(self, said: Notice, moment: Moment) -> Iterator[Json]:
        yield {"type": "header", "text": _plain(said.headline, HEADER_LENGTH)}
        if said.sentences:
            yield {"type": "section", "text": _plain("\n".join(said.sentences), SECTION_LENGTH)}
        for is_code, group in groupby(said.facts, key=attrgetter("is_code")):
            facts = list(group)
            yield from map(_code, facts) if is_code else self._fields(facts, moment)
        elements = [self._value(fact, moment, f"{fact.label}: ") for fact in said.details[:CONTEXT_ELEMENTS]]
        yield {"type": "context", "elements": elements}

    def _fields(self, facts: Sequence[Fact], moment: Moment) -> Iterator[Json]:
        """Lay facts out with the label to the left of the value."""
        pairs = FIELDS // 2
        for start in range(0, len(facts), pairs):
            fields = [
                field
                for fact in facts[start : start + pairs]
                for field in (_markup(f"*{fact.label}*"), self._value(fact, moment))
            ]
            yield {"type": "section", "fields": fields}

    def _value(self, fact: Fact, moment: Moment, before: str = "") -> Json:
        if self._zone or not fact.has_instant:
            return _plain(before + fact.text, FIELD_LENGTH)
        parts = (_date(part, moment) if isinstance(part, datetime) else part for part in fact.parts)
        return _markup(before + "".join(parts))


def _date(instant: datetime, moment: Moment) -> str:
    """Write an instant so that each reader sees their own time zone."""
    return f"<!date^{int(instant.timestamp())}^{{date_short_pretty}} {{time}}|{moment.clock(instant)}>"


def _code(fact: Fact) -> Json:
    return {"type": "section", "text": _markup(f"*{fact.label}*\n```{fact.text}```")}


def _markup(text: str) -> Json:
    """Make a text object of this program's own words."""
    return {"type": "mrkdwn", "text": text, "verbatim": True}


def _plain(text: str, most: int) -> Json:
    """Make a text object in which nothing acts, escaped as Slack asks for."""
    escaped = _escape(text)
    if length(escaped) > most:
        growth = length(escaped) - length(text)
        escaped = _escape(cut(text, max(most - growth, most // _LONGEST_ENTITY)))
    return {"type": "plain_text", "text": escaped, "emoji": True}


def _escape(text: str) -> str:
    return _break(text.translate(_ENTITIES))


def _signs(text: str) -> str:
    return _break(_OUTER_UNDERSCORE.sub("＿", text.translate(_LOOKALIKES)))  # noqa: RUF001


def _break(text: str) -> str:
    return _ACTIVE.sub("\\g<0>\u200b", text)
