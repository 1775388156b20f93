"""Show an event in Microsoft Teams: an Adaptive Card 1.4 for a Workflow that takes webhook requests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import ClassVar, Literal

from bridge.formats.base import ChatFormat, ChatSettings
from bridge.formats.notice import Notice, notice
from bridge.formats.text import Fact, cut
from bridge.runtime.json import Json

# Teams: about 28 KB a message, counted as it is sent.
MESSAGE_BYTES = 28_000
CONTENT_TYPE = "application/vnd.microsoft.card.adaptive"

_TEXT_LENGTH = 1_000
# When a hostile text needs six bytes a letter, twenty of them still fit.
_SHORT_TEXT_LENGTH = 150
# `{{DATE(...)}}` acts in every text of a card, a `<at>` where mentions are.
_ACTIVE = re.compile(r"\{(?=\{)|<(?=/?at)", re.IGNORECASE)
_encode = json.JSONEncoder(separators=(",", ":")).encode


# What Power Automate and Logic Apps answer to every request to a wrong address.
_SETUP_ERROR = re.compile(
    rb'"code"\s*:\s*"(?:DirectApi\w+|MissingApiVersionParameter|WorkflowNotFound|WorkflowTriggerIsNotEnabled)"'
)


class TeamsSettings(ChatSettings):
    """Adaptive Cards for a Teams workflow, at the rate that it takes."""

    format: Literal["teams"]
    max_per_second: float | None = 4.0


class Teams(ChatFormat):
    """A card whose texts from outside stand in runs, which know no Markdown."""

    settings: ClassVar = TeamsSettings

    def __init__(self, settings: ChatSettings) -> None:
        self._zone = settings.zone

    @staticmethod
    def is_setup_error(body: bytes) -> bool:
        """Recognise a workflow's address that is incomplete, wrong or turned off."""
        return _SETUP_ERROR.search(body) is not None

    def write(self, event: Mapping[str, Json], now: datetime) -> Json:
        """Return the message."""
        said = notice(event, now=now, zone=self._zone)
        message = self._message(said, _TEXT_LENGTH)
        return message if len(_encode(message)) <= MESSAGE_BYTES else self._message(said, _SHORT_TEXT_LENGTH)

    def _message(self, said: Notice, most: int) -> Json:
        lines = [self._fact(fact, most) for fact in said.facts]
        small = [self._fact(fact, most, isSubtle=True, size="Small") for fact in said.details]
        card = {
            "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
            "type": "AdaptiveCard",
            "version": "1.4",
            "msteams": {"width": "Full"},
            "body": [
                {"type": "Container", "style": said.tone, "bleed": True, "items": list(_head(said))},
                *lines,
                {"type": "Container", "separator": True, "items": small},
            ],
        }
        attachment = {"contentType": CONTENT_TYPE, "contentUrl": None, "content": card}
        return {"type": "message", "attachments": [attachment]}

    def _fact(self, fact: Fact, most: int, **look: Json) -> Json:
        if fact.has_instant and not self._zone:
            text = "".join(_date(part) if isinstance(part, datetime) else part for part in fact.parts)
            return {
                "type": "TextBlock",
                "text": f"**{fact.label}:** {text}",
                "wrap": True,
                "spacing": "Small",
                **look,
            }
        code = {"fontType": "Monospace"} if fact.is_code else {}
        label = _run(f"{fact.label}: ", weight="Bolder", **look)
        value = _run(cut(fact.text, most), **code, **look)
        return {"type": "RichTextBlock", "inlines": [label, value], "spacing": "Small"}


def _head(said: Notice) -> Iterator[Json]:
    title = _run(said.headline, size="Medium", weight="Bolder")
    yield {"type": "RichTextBlock", "inlines": [title]}
    for sentence in said.sentences:
        yield {"type": "RichTextBlock", "inlines": [_run(sentence)], "spacing": "Small"}


def _run(text: str, **look: Json) -> Json:
    return {"type": "TextRun", "text": _ACTIVE.sub("\\g<0>\u200b", text), **look}


def _date(instant: datetime) -> str:
    """Write an instant so that each reader sees their own time zone; the functions know no fractions of a second."""
    told = f"{instant:%Y-%m-%dT%H:%M:%SZ}"
    return f"{{{{DATE({told}, SHORT)}}}} {{{{TIME({told})}}}}"
