"""Decide whether a message matches a subscription: correlation filters, and SQL filters.

SQLite evaluates the SQL, with the properties as parameters: a comparison with a missing property is unknown, and
unknown does not match. Functions are refused when the configuration is read.
"""

from __future__ import annotations

import re
import sqlite3
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from bridge.lab.httpd import LabError
from bridge.lab.servicebus.messages import Content

# The names after `sys.`, in lower case, and the message property each stands for.
SYSTEM_PROPERTIES = {
    "messageid": "message_id",
    "correlationid": "correlation_id",
    "label": "subject",
    "subject": "subject",
    "to": "to",
    "replyto": "reply_to",
    "contenttype": "content_type",
    "sessionid": "session_id",
    "replytosessionid": "reply_to_session_id",
}
MAX_CHARACTERS = 1024
_WORDS = "and|or|not|in|like|escape|is|null|true|false"
_TOKEN = re.compile(
    rf"""(?P<text>'(?:[^']|'')*')
    | (?P<word>\b(?:{_WORDS})\b)
    | (?P<exists>\bexists\s*\()
    | (?P<call>\b[^\W\d]\w*\s*\()
    | (?:(?P<scope>\b(?:sys|user))\.)?(?P<name>\[(?:[^\]]|\]\])+\]|"(?:[^"]|"")+"|\b[^\W\d]\w*)""",
    re.VERBOSE | re.IGNORECASE,
)

Filter = Callable[[Content], bool]


def everything(_: Content) -> bool:
    """Match every message."""
    return True


class Correlation:
    """Match a message whose named properties all have these values."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        """Read the filter's content; raise LabError if it names an unknown property of messages."""
        unknown = [name for name in content if name != "Properties" and name.lower() not in SYSTEM_PROPERTIES]
        if unknown:
            raise LabError(f"CorrelationFilter given: {unknown[0]}; expected: a property of the message")
        self._system = {
            SYSTEM_PROPERTIES[name.lower()]: value for name, value in content.items() if name != "Properties"
        }
        self._application = content.get("Properties") or {}

    def __call__(self, content: Content) -> bool:
        """Return whether the message matches."""
        if any(content.properties.get(name) != value for name, value in self._system.items()):
            return False
        found = _folded(content)
        return all(found.get(name.lower()) == value for name, value in self._application.items())


class Sql:
    """Match a message for which an SQL expression is true."""

    def __init__(self, expression: str) -> None:
        """Read the expression; raise LabError if SQLite cannot."""
        self.expression = expression
        self._names: list[tuple[bool, str]] = []
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        weakref.finalize(self, self._database.close)
        self._database.execute("PRAGMA case_sensitive_like = ON")
        self._database.create_function("given", 1, lambda value: value is not None)  # EXISTS
        self._query = f"SELECT ({_TOKEN.sub(self._replace, expression)})"
        if len(expression) > MAX_CHARACTERS:
            raise self._fault(f"at most {MAX_CHARACTERS} characters")
        try:
            self._value([None] * len(self._names))
        except sqlite3.Error as error:
            raise self._fault(f"an SQL condition ({error})") from error

    def __call__(self, content: Content) -> bool:
        """Return whether the message matches."""
        folded = _folded(content)
        found = [
            content.properties.get(SYSTEM_PROPERTIES.get(name, "")) if of_system else folded.get(name)
            for of_system, name in self._names
        ]
        return bool(self._value(found) == 1)

    def _value(self, values: list[Any]) -> Any:
        plain = [one if isinstance(one, int | float | None) else str(one) for one in values]
        return self._database.execute(self._query, plain).fetchone()[0]

    def _replace(self, match: re.Match[str]) -> str:
        kind = match.lastgroup
        if kind == "exists":
            return "given("
        if kind == "call":
            raise self._fault(f"no function such as {match[0]}...)")
        if kind != "name":
            return match[0]
        name = match["name"]
        if name[0] in '["':
            name = name[1:-1].replace(name[-1] * 2, name[-1])
        of_system = (match["scope"] or "").lower() == "sys"
        if of_system and name.lower() not in SYSTEM_PROPERTIES:
            raise self._fault(f"a property of the message, not sys.{name}")
        self._names.append((of_system, name.lower()))
        return "?"

    def _fault(self, expected: str) -> LabError:
        return LabError(f"SQL filter given: {self.expression!r}; expected: {expected}")


def _folded(content: Content) -> dict[str, Any]:
    return {name.lower(): value for name, value in content.application_properties.items()}
