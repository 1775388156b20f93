"""Decide whether a message matches a subscription: correlation filters, and a subset of the SQL filters.

The SQL subset: =, <>, !=, [NOT] IN, [NOT] LIKE with ESCAPE, IS [NOT] NULL, EXISTS, NOT, AND, OR, parentheses and
constants. Arithmetic, other comparisons and functions are refused when the configuration is read. A comparison
with a missing property is unknown, and unknown does not match.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bridge.lab.httpd import LabError
from bridge.lab.servicebus.sections import Content

MAX_SQL_CHARACTERS = 1024

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

Truth = bool | None
Term = Callable[[Content], Any]
Filter = Callable[[Content], bool]


@dataclass(frozen=True, kw_only=True)
class Correlation:
    """Match a message whose named properties all have these values."""

    system: Mapping[str, str] = field(default_factory=dict)
    application: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, content: Content) -> bool:
        """Return whether the message matches."""
        if any(content.properties.get(name) != value for name, value in self.system.items()):
            return False
        if not self.application:
            return True
        found = _folded(content)
        return all(found.get(name.lower()) == value for name, value in self.application.items())


class Sql:
    """Match a message for which an SQL expression is true."""

    def __init__(self, expression: str) -> None:
        """Read the expression; raise LabError if it is outside the lab's subset."""
        if len(expression) > MAX_SQL_CHARACTERS:
            raise LabError(
                f"SQL filter given: {len(expression)} characters; expected: {MAX_SQL_CHARACTERS} at most"
            )
        self.expression = expression
        self._condition = _Parser(expression).parse()

    def __call__(self, content: Content) -> bool:
        """Return whether the message matches."""
        return self._condition(content) is True


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Hold a filter of a subscription under its name."""

    name: str
    matches: Filter


EVERYTHING = Rule(name="$Default", matches=lambda _: True)


def _folded(content: Content) -> dict[str, Any]:
    return {name.lower(): value for name, value in content.application_properties.items()}


# --- the language ---

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<text>'(?:[^']|'')*')
  | (?P<number>[+-]?\d+(?:\.\d+)?)
  | (?P<quoted>\[(?:[^\]]|\]\])*\]|"(?:[^"]|"")*")
  | (?P<word>[^\W\d]\w*)
  | (?P<sign><>|!=|=|\(|\)|,|\.)
    )""",
    re.VERBOSE,
)
_RESERVED = frozenset({"and", "or", "not", "in", "like", "escape", "is", "null", "exists", "true", "false"})


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    at: int


def _tokens(expression: str) -> list[_Token]:
    found = []
    at = 0
    end = len(expression.rstrip())
    while at < end:
        match = _TOKEN.match(expression, at)
        if match is None:
            raise LabError(
                f"SQL filter given: {expression[at : at + 20]!r} at {at}; expected: a word of the lab's subset"
            )
        kind = str(match.lastgroup)
        found.append(_Token(kind, match[kind], match.start(kind)))
        at = match.end()
    return found


class _Parser:
    """Parse an expression by recursive descent: OR, AND, NOT, comparison."""

    def __init__(self, expression: str) -> None:
        self._expression = expression
        self._tokens = _tokens(expression)
        self._at = 0

    def parse(self) -> Term:
        """Return the condition; it evaluates to True, False or None for unknown."""
        condition = self._either()
        if self._at < len(self._tokens):
            raise self._fault("the end")
        return condition

    def _either(self) -> Term:
        terms = [self._both()]
        while self._take("or"):
            terms.append(self._both())
        return terms[0] if len(terms) == 1 else partial(_any, terms)

    def _both(self) -> Term:
        terms = [self._negated()]
        while self._take("and"):
            terms.append(self._negated())
        return terms[0] if len(terms) == 1 else partial(_all, terms)

    def _negated(self) -> Term:
        if self._take("not"):
            return _not(self._negated())
        if self._take("("):
            condition = self._either()
            self._expect(")")
            return condition
        if self._take("exists"):
            self._expect("(")
            term = self._term()
            self._expect(")")
            return lambda content: term(content) is not None
        return self._comparison()

    def _comparison(self) -> Term:
        left = self._term()
        if self._take("="):
            return partial(_equal, left, self._term())
        if self._take("<>") or self._take("!="):
            return _not(partial(_equal, left, self._term()))
        if self._take("is"):
            wanted = not self._take("not")
            self._expect("null")
            return lambda content: (left(content) is None) is wanted
        negated = self._take("not")
        condition = self._in(left) if self._take("in") else self._like(left)
        return _not(condition) if negated else condition

    def _in(self, left: Term) -> Term:
        self._expect("(")
        choices = [self._term()]
        while self._take(","):
            choices.append(self._term())
        self._expect(")")
        return partial(_any, [partial(_equal, left, choice) for choice in choices])

    def _like(self, left: Term) -> Term:
        self._expect("like")
        pattern = self._text()
        escape = self._text() if self._take("escape") else ""
        compiled = _like_pattern(pattern, escape)

        def matches(content: Content) -> Truth:
            value = left(content)
            return None if value is None else isinstance(value, str) and compiled.fullmatch(value) is not None

        return matches

    def _term(self) -> Term:
        token = self._next("a property or a constant")
        if token.kind == "text":
            return _constant(token.text[1:-1].replace("''", "'"))
        if token.kind == "number":
            return _constant(float(token.text) if "." in token.text else int(token.text))
        if token.kind == "word" and token.text.lower() in _RESERVED:
            constants = {"true": True, "false": False, "null": None}
            if token.text.lower() not in constants:
                raise self._fault("a property or a constant", token)
            return _constant(constants[token.text.lower()])
        if token.kind in ("word", "quoted"):
            return self._property(token)
        raise self._fault("a property or a constant", token)

    def _property(self, token: _Token) -> Term:
        scope, name = "user", _name(token)
        if token.kind == "word" and self._take("."):
            scope, name = name.lower(), _name(self._next("a property's name"))
        if scope == "user":
            return _application(name.lower())
        if scope != "sys" or name.lower() not in SYSTEM_PROPERTIES:
            raise self._fault("sys. before a property of the message, or user.", token)
        return _system(SYSTEM_PROPERTIES[name.lower()])

    def _text(self) -> str:
        token = self._next("a text in single quotes")
        if token.kind != "text":
            raise self._fault("a text in single quotes", token)
        return token.text[1:-1].replace("''", "'")

    def _take(self, word: str) -> bool:
        if self._at < len(self._tokens):
            token = self._tokens[self._at]
            if token.kind in ("word", "sign") and token.text.lower() == word:
                self._at += 1
                return True
        return False

    def _expect(self, word: str) -> None:
        if not self._take(word):
            raise self._fault(word.upper())

    def _next(self, expected: str) -> _Token:
        if self._at >= len(self._tokens):
            raise self._fault(expected)
        self._at += 1
        return self._tokens[self._at - 1]

    def _fault(self, expected: str, token: _Token | None = None) -> LabError:
        if token is None and self._at < len(self._tokens):
            token = self._tokens[self._at]
        given = "the end" if token is None else f"{token.text!r} at {token.at}"
        return LabError(f"SQL filter {self._expression!r} given: {given}; expected: {expected}")


def _name(token: _Token) -> str:
    if token.kind != "quoted":
        return token.text
    closing = token.text[-1]
    return token.text[1:-1].replace(closing * 2, closing)


def _like_pattern(pattern: str, escape: str) -> re.Pattern[str]:
    parts = []
    letters = iter(pattern)
    for letter in letters:
        if escape and letter == escape:
            parts.append(re.escape(next(letters, "")))
        elif letter == "%":
            parts.append(".*")
        elif letter == "_":
            parts.append(".")
        else:
            parts.append(re.escape(letter))
    return re.compile("".join(parts), re.DOTALL)


# --- evaluation ---


def _constant(value: object) -> Term:
    return lambda _: value


def _application(name: str) -> Term:
    return lambda content: _folded(content).get(name)


def _system(name: str) -> Term:
    return lambda content: content.properties.get(name)


def _equal(left: Term, right: Term, content: Content) -> Truth:
    one, other = left(content), right(content)
    return None if one is None or other is None else bool(one == other)


def _not(term: Term) -> Term:
    def negation(content: Content) -> Truth:
        truth = term(content)
        return None if truth is None else not truth

    return negation


def _all(terms: list[Term], content: Content) -> Truth:
    truths = [term(content) for term in terms]
    return False if False in truths else None if None in truths else True


def _any(terms: list[Term], content: Content) -> Truth:
    truths = [term(content) for term in terms]
    return True if True in truths else None if None in truths else False
