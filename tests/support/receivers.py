"""What the receivers' documentation allows, checked strictly; and what nothing from outside may do there."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from bridge.config.registry import format_class
from tests.support.only import only

ROUTING_KEY = "neverToBeShown0123456789abcdefgh"  # of the length that PagerDuty asks for
SPACE = "\u200b"  # of no width
CONSOLE = "https://console.example.org"

_BIDI = set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_CLOCK = r"(?:[A-Z][a-z]{2} \d\d [A-Z][a-z]{2} )?\d\d:\d\d(?::\d\d)? UTC"
_OWN_WORDS = r"[A-Za-z0-9 ,:]*"
_SLACK_DATE = rf"<!date\^\d+\^\{{date_short_pretty\}} \{{time\}}\|{_CLOCK}>"
_LINK = rf"{re.escape(CONSOLE)}/event/(?:[0-9a-z.-]|%[0-9A-F]{{2}})+"
_SLACK_LINK = rf"<{_LINK}\|(?:console|Open in the console)>"
_SLACK_MARKUP = re.compile(
    rf"{_SLACK_LINK}|\*[A-Za-z0-9 ]+\*(?:\n```[A-Za-z0-9 ._-]+```)?|{_OWN_WORDS}(?:{_SLACK_DATE}{_OWN_WORDS})+"
)
_SECOND = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
_TEAMS_DATE = rf"\{{\{{DATE\({_SECOND}, SHORT\)\}}\}} \{{\{{TIME\({_SECOND}\)\}}\}}"
_TEAMS_MARKDOWN = re.compile(rf"\*\*[A-Za-z0-9 ]+:\*\* {_OWN_WORDS}(?:{_TEAMS_DATE}{_OWN_WORDS})+")
_CARD_TYPE = "application/vnd.microsoft.card.adaptive"
_CARD = {
    "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
    "type": "AdaptiveCard",
    "version": "1.4",
    "msteams": {"width": "Full"},
}
_LOOK: Mapping[str, tuple[Any, ...]] = {
    "size": ("Default", "Small", "Medium", "Large", "ExtraLarge"),
    "weight": ("Default", "Lighter", "Bolder"),
    "fontType": ("Default", "Monospace"),
    "isSubtle": (True,),
}


def settings(format_: str, **values: Any) -> Any:
    return format_class(format_).settings.model_validate(
        {"kind": "webhook", "url": "https://hooks.example.org/x", "format": format_, **values}
    )


def units(text: str) -> int:
    return len(text.encode("utf-16-le")) // 2


def strings(value: Any) -> Iterator[str]:
    """Walk over every text of a message, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)


def check_texts(message: Any) -> None:
    json.loads(json.dumps(message, allow_nan=False, ensure_ascii=False).encode())
    for text in strings(message):
        kinds = {unicodedata.category(letter) for letter in text if letter != "\n"}
        assert not kinds & {"Cc", "Cs"}, ascii(text)
        assert not _BIDI & set(text), ascii(text)


def check_slack(message: Any) -> None:
    """Check by the reference of Block Kit, and `text` also as the `content` that Discord makes of it."""
    check_texts(message)
    assert set(message) == {"text", "blocks", "unfurl_links", "unfurl_media"}
    assert 0 < units(message["text"]) <= 2_000
    _check_no_markup(re.sub(rf"{_LINK}$", "", message["text"], flags=re.MULTILINE))
    assert 0 < len(message["blocks"]) <= 50
    for block in message["blocks"]:
        _check_block(block)


def _check_no_markup(text: str) -> None:
    assert not set(text) & set("&<>*~`|[]\\")
    assert not re.search(rf"@(?!{SPACE}|…)|://|(?<![^\W_])_|_(?![^\W_])|(?m:^(?:#|-|>|\d+\.))", text)
    assert not re.search(r"(?<!\d):\w+:", text)


def _check_block(block: Any) -> None:
    match block:
        case {"type": "header", "text": text, **rest}:
            assert text["type"] == "plain_text"
            _check_text_object(text, 150)
        case {"type": "section", "text": text, **rest}:
            _check_text_object(text, 3_000)
        case {"type": "section", "fields": fields, **rest}:
            assert 0 < len(fields) <= 10
            for field in fields:
                _check_text_object(field, 2_000)
        case {"type": "context", "elements": elements, **rest}:
            assert 0 < len(elements) <= 10
            for element in elements:
                _check_text_object(element, 3_000)
        case _:
            raise AssertionError(f"no block that is known: {block}")
    assert not rest


def _check_text_object(given: Any, most: int) -> None:
    text = given["text"]
    assert 0 < units(text) <= most
    if given["type"] == "mrkdwn":
        assert set(given) == {"type", "text", "verbatim"}
        if not _SLACK_MARKUP.fullmatch(text):  # a line of a digest
            assert "\n" not in text
            _check_no_markup(re.sub(rf" {_SLACK_LINK}$", "", text))
        return
    assert set(given) == {"type", "text", "emoji"}
    assert given["type"] == "plain_text"
    assert not re.search(r"[<>]|&(?!(?:amp|lt|gt);)", text), text
    assert not re.search(rf"@(?!{SPACE}|…)|://|(?<!\d):[\w+'-]+:", text, re.ASCII), text


def check_teams(message: Any) -> None:
    """Check by the schema of Adaptive Cards 1.4, as far as it is used here, in what a Workflow takes."""
    check_texts(message)
    assert len(json.dumps(message, separators=(",", ":"))) <= 28 * 1024
    content = only(message["attachments"])["content"]
    attachment = {"contentType": _CARD_TYPE, "contentUrl": None, "content": content}
    assert message == {"type": "message", "attachments": [attachment]}
    assert content == {**_CARD, "body": content["body"]}
    for element in content["body"]:
        _check_element(element)


def _check_element(element: Any) -> None:
    match element:
        case {"type": "Container", "items": [_, *_] as items, **rest}:
            assert rest.pop("style", "default") in {"default", "attention", "good", "warning", "accent"}
            assert all(value is True for value in rest.values())
            assert set(rest) <= {"bleed", "separator"}
            for item in items:
                _check_element(item)
        case {"type": "RichTextBlock", "inlines": [_, *_] as inlines, **rest}:
            assert rest in ({}, {"spacing": "Small"})
            for inline in inlines:
                _check_run(inline)
        case {"type": "TextBlock", "text": text, "wrap": True, "spacing": "Small", **rest}:
            assert _TEAMS_MARKDOWN.fullmatch(text), text
            _check_look(rest)
        case _:
            raise AssertionError(f"no element that is known: {element}")


def _check_run(run: Any) -> None:
    assert run["type"] == "TextRun"
    assert run["text"]
    assert "{{" not in run["text"]
    assert not re.search(r"</?at", run["text"], re.IGNORECASE)
    action = run.get("selectAction")
    assert action is None or (action.keys(), action["type"]) == ({"type", "url"}, "Action.OpenUrl")
    assert action is None or re.fullmatch(_LINK, action["url"])
    _check_look({name: run[name] for name in run if name not in ("type", "text", "selectAction")})


def _check_look(look: Mapping[Any, Any]) -> None:
    assert [name for name, value in look.items() if value not in _LOOK.get(name, ())] == []


def check_pagerduty(request: Any) -> None:
    """Check by the Events API v2: its "Send an alert event", and its size limit."""
    check_texts(request)
    assert len(json.dumps(request)) <= 512 * 1024
    links = request.get("links", [])
    assert set(request) - {"links"} == {"routing_key", "event_action", "dedup_key", "client", "payload"}
    assert all(re.fullmatch(_LINK, link["href"]) and link["text"] for link in links)
    assert request["routing_key"] == ROUTING_KEY
    assert request["event_action"] in {"trigger", "acknowledge", "resolve"}
    assert re.fullmatch(r"[!-~]{1,255}", request["dedup_key"])
    payload = request["payload"]
    optional = {"timestamp", "component", "group", "class", "custom_details"}
    assert {"summary", "source", "severity"} <= set(payload) <= {"summary", "source", "severity"} | optional
    assert 0 < len(payload["summary"]) <= 1_024
    assert payload["severity"] in {"critical", "error", "warning", "info"}
    assert all(isinstance(value, str) and value for value in payload["custom_details"].values())
    rest = {name: value for name, value in payload.items() if name != "custom_details"}
    assert all(isinstance(value, str) and value for value in rest.values())
    if "timestamp" in payload:
        datetime.fromisoformat(payload["timestamp"])


_SCHEDULED_EVENTS = "io.imdsbridge.scheduledevent.*"
_NOTICES = (_SCHEDULED_EVENTS, "io.imdsbridge.approval.*")


@dataclass(frozen=True, kw_only=True)
class FormatRow:
    """What tests know of a webhook format: a new format is a new row.

    Attributes:
        types, age_seconds, per_second: the defaults of its settings.
        needed: the settings that it does not work without.
        check: fails on a message that the receiver would refuse; None if it takes anything.
    """

    types: tuple[str, ...] = _NOTICES
    age_seconds: float = 3600.0
    per_second: float | None = None
    needed: Mapping[str, Any] = field(default_factory=dict)
    check: Callable[[Any], None] | None = None

    @property
    def is_chat_format(self) -> bool:
        return self.types != ("*",)


FORMATS = {
    "cloudevents": FormatRow(types=("*",), age_seconds=604_800.0),
    "pagerduty": FormatRow(
        types=(
            _SCHEDULED_EVENTS,
            *(f"io.imdsbridge.approval.{one}.v1" for one in ("outofwork", "recovered")),
        ),
        per_second=2.0,
        needed={"routing_key": ROUTING_KEY},
        check=check_pagerduty,
    ),
    "slack": FormatRow(per_second=1.0, check=check_slack),
    "teams": FormatRow(per_second=4.0, check=check_teams),
    "template": FormatRow(
        needed={"template": {"text": "{{ data.Description }}", "id": "{{ event.id }}"}},
    ),
}


def make_format(format_: str, *, console_url: str = "", **values: Any) -> Any:
    """Make a format with what it needs, and these settings."""
    made = settings(format_, **{**FORMATS[format_].needed, **values})
    return format_class(format_)(made.linked(console_url))
