"""Write an event as the operator's own JSON: a document whose texts are Jinja2 templates.

Each text is rendered on its own, so that no value can break the JSON. The author of a template is trusted, values are
not: a template reaches nothing of Python, and no value is evaluated.

I/O: the file in `template_file`, once.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime, tzinfo
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Literal

from jinja2 import ChainableUndefined, Undefined
from jinja2.exceptions import TemplateSyntaxError
from jinja2.filters import FILTERS
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import model_validator

from bridge.config.base import Fault, Faults
from bridge.config.values import quote_path
from bridge.formats.base import ChatFormat, ChatSettings
from bridge.formats.notice import notice
from bridge.formats.text import TRUNCATED, instant_of
from bridge.runtime.json import Json
from bridge.runtime.time import iso_utc

MAX_BYTES = 256 * 1024
MIN_CUT_LENGTH = 64
FAILED = "(cannot be shown)"

_FILTERS = (
    *("capitalize", "count", "d", "default", "first", "float", "int", "items", "join", "last", "length"),
    *("list", "lower", "map", "max", "min", "reject", "rejectattr", "replace", "reverse", "round", "select"),
    *("selectattr", "sort", "string", "sum", "title", "trim", "truncate", "unique", "upper"),
)
_ROOTS = ("event", "data", "notice", "now")
_ONE_EXPRESSION = re.compile(r"\s*\{\{-?((?:(?!\}\}|\{\{|\{%).)+?)-?\}\}\s*", re.DOTALL)
_MENTIONS_OR_LINKS = re.compile(r"[@<]|\](?=\()")

Variables = Mapping[str, Any]
Leaf = Callable[[Variables], Json]


class _Exact(str):
    """A text that is shown as it came."""

    __slots__ = ()


class _Missing(ChainableUndefined):
    """What is missing or null: it shows as nothing, compares as false, and nothing comes of computing with it."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, Undefined)

    def _is_false(self, _: object) -> bool:
        return False

    __hash__ = ChainableUndefined.__hash__
    __lt__ = __le__ = __gt__ = __ge__ = _is_false  # type: ignore[assignment]


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja2 that reads JSON only; `noted` are the names that were shown or worked with but not there."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, zone: tzinfo) -> None:
        self.noted = noted = set[str]()

        class Missing(_Missing):
            __slots__ = ()

            def __str__(self) -> str:
                noted.add(str(self._undefined_name))
                return ""

            def __iter__(self) -> Iterator[Any]:
                noted.add(str(self._undefined_name))
                return iter(())

        super().__init__(undefined=Missing, finalize=_shown, keep_trailing_newline=True)
        self.globals.clear()
        self.filters = {name: FILTERS[name] for name in _FILTERS}
        self.filters.update(exact=lambda value: _Exact(_text(value)), tojson=_tojson, local_time=_in(zone))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return an object's value or a list's element; null counts as missing."""
        try:
            value = obj[argument]
        except (TypeError, LookupError):
            value = None
        return self.undefined(name=str(argument)) if value is None else value

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an object's value, or where a loop stands; never an attribute of Python's."""
        if isinstance(obj, LoopContext):
            return super().getattr(obj, attribute)
        return self.getitem(obj, attribute)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute with numbers, and join texts or lists: nothing that makes much of little."""
        if isinstance(left, Undefined) or isinstance(right, Undefined):
            self.noted.update(str(one._undefined_name) for one in (left, right) if isinstance(one, Undefined))
            return self.undefined(name="")
        is_number = isinstance(left, int | float) and isinstance(right, int | float)
        if operator == "**" or not (is_number or (operator == "+" and type(left) is type(right))):
            raise TypeError(f"{operator} between {type(left).__name__} and {type(right).__name__}")
        return super().call_binop(context, operator, left, right)


def _text(value: Any) -> str:
    """Write a value as text: null as nothing, and every other value than a text as JSON."""
    if isinstance(value, str | Undefined):
        return str(value)
    return "" if value is None else _tojson(value)


def _shown(value: Any) -> str:
    """Write a value so that it mentions no one and links nowhere: an invisible space follows `@`, `<` and `](`."""
    return value if isinstance(value, _Exact) else _MENTIONS_OR_LINKS.sub("\\g<0>\u200b", _text(value))


def _safe(value: Any) -> Any:
    """Keep a text from mentioning anyone; a list or an object is data, and passes as it came."""
    return _shown(value) if isinstance(value, str) else value


def _plain(value: Any) -> Json:
    """Bring a value into JSON that any receiver can read: no half characters, no endless numbers."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_plain(str(name)): _plain(inner) for name, inner in value.items()}
    if isinstance(value, bool | int | None):
        return value
    if isinstance(value, Undefined):
        return str(value) or None  # asking for its text notes it
    return [_plain(inner) for inner in value]


def _tojson(value: Any) -> str:
    return json.dumps(_plain(value), ensure_ascii=False)


def _in(zone: tzinfo) -> Callable[..., str]:
    def local_time(value: Any, form: str = "%Y-%m-%d %H:%M %Z") -> str:
        instant = instant_of(value)
        return instant.astimezone(zone).strftime(form) if instant else _text(value)

    return local_time


class TemplateSettings(ChatSettings):
    """The operator's own JSON, in `template` or in the file `template_file`."""

    format: Literal["template"]
    template: Any
    """The JSON of the body, with Jinja2 expressions in its strings. Example: `{ text = "{{ notice.title }}" }`."""

    @classmethod
    def known_keys(cls) -> list[str]:
        """Name every key that may be written."""
        return [*super().known_keys(), "template_file"]

    @model_validator(mode="before")
    @classmethod
    def _read_file(cls, given: Any) -> Any:
        if not isinstance(given, dict) or "template_file" not in given:
            return given
        taken = dict(given)
        template = _read_json(Path(str(taken.pop("template_file"))))
        return {**taken, "template": template}

    def find_faults(self) -> Iterator[Fault]:
        """Yield a template that is no JSON; a fault of the setting alone would show its value."""
        yield from super().find_faults()
        if not isinstance(self.template, dict | list):
            yield "template", 'expected a table, for example { text = "{{ notice.title }}" }'
            return
        try:
            json.dumps(self.template, allow_nan=False)
        except (TypeError, ValueError):
            yield "template", "expected texts, numbers, true, false, tables and lists only"


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        text = f"given {quote_path(path)}, it cannot be read: {error.strerror}"
        raise Faults([("template_file", text)]) from None
    except ValueError as error:
        raise Faults([("template_file", f"{path} is no JSON: {error}")]) from None


class Template(ChatFormat):
    """The operator's own JSON, of which every text is a Jinja2 template."""

    settings: ClassVar = TemplateSettings

    def __init__(self, settings: TemplateSettings) -> None:
        """Compile the template.

        Raises:
            ValueError: a text in it is faulty; says where and what was expected.
        """
        self._zone: tzinfo = settings.zone or UTC
        self._sandbox = _Sandbox(self._zone)
        self._leaves: dict[str, Leaf] = {}
        self._shape = self._compile(settings.template, "template")

    def check(self, events: Iterable[Mapping[str, Json]], now: datetime) -> None:
        """Try the template on events of every type that will come.

        Raises:
            ValueError: it names what none of them has, or fails for one; says where, and what comes near.
        """
        every = {str(event.get("type")): self._variables(event, now) for event in events}
        known = {name for variables in every.values() for name in _names(variables)} | {""}
        faults = []
        for path, leaf in self._leaves.items():
            self._sandbox.noted.clear()
            for type_, variables in every.items():
                try:
                    leaf(variables)
                except Exception as error:  # noqa: BLE001 - whatever it is, it is the template's fault
                    faults.append(f"{path}: fails for {type_}: {error}")
                    break
            for name in sorted(self._sandbox.noted - known):
                faults.append(f"{path}: {name} is in no event that this sink takes{_near(name, known)}")
        if faults:
            raise ValueError("; ".join(faults))

    def write(self, event: Mapping[str, Json], now: datetime) -> Json:
        """Return the JSON for an event; a text that fails for it says so in its place.

        Raises:
            ValueError: it is too long, even with its texts cut.
        """
        return _fitted(self._fill(self._shape, self._variables(event, now)))

    def _variables(self, event: Mapping[str, Json], now: datetime) -> Variables:
        return {
            "event": {name: value for name, value in event.items() if name != "data"},
            "data": event.get("data"),
            "notice": asdict(notice(event, now=now, zone=self._zone)),
            "now": iso_utc(now),
        }

    def _compile(self, shape: Json, path: str) -> Json | Leaf:
        """Put a function in the place of every text."""
        if isinstance(shape, dict):
            return {name: self._compile(inner, f"{path}.{name}") for name, inner in shape.items()}
        if isinstance(shape, list):
            return [self._compile(inner, f"{path}[{index}]") for index, inner in enumerate(shape)]
        if not isinstance(shape, str):
            return shape
        try:
            self._leaves[path] = self._leaf(shape)
        except TemplateSyntaxError as error:
            raise ValueError(f"{path}, line {error.lineno}: {error.message}") from None
        return self._leaves[path]

    def _leaf(self, text: str) -> Leaf:
        if one := _ONE_EXPRESSION.fullmatch(text):
            value = self._sandbox.compile_expression(one[1].strip(), undefined_to_none=False)
            return lambda variables: _plain(_safe(value(**variables)))
        compiled = self._sandbox.from_string(text)
        return lambda variables: _plain(compiled.render(variables))

    def _fill(self, shape: Any, variables: Variables) -> Json:
        if isinstance(shape, dict):
            return {name: self._fill(inner, variables) for name, inner in shape.items()}
        if isinstance(shape, list):
            return [self._fill(inner, variables) for inner in shape]
        if not callable(shape):
            return shape
        try:
            return shape(variables)
        except Exception:  # noqa: BLE001 - a value that the template does not expect must not cost the notice
            return FAILED


def _names(value: Json) -> Iterator[str]:
    """List all names in a value, at any depth."""
    if isinstance(value, Mapping):
        yield from value
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _names(inner)


def _near(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(_ROOTS)}"


def _fitted(written: Json) -> Json:
    """Cut long texts, equally, until the JSON fits."""
    most = MAX_BYTES
    while len(json.dumps(written)) > MAX_BYTES:
        if most <= MIN_CUT_LENGTH:
            raise ValueError(f"more than {MAX_BYTES} bytes, even with its texts cut")
        most //= 2
        written = _cut(written, most)
    return written


def _cut(value: Json, most: int) -> Json:
    if isinstance(value, str):
        return value if len(value) <= most else value[: most - len(TRUNCATED)] + TRUNCATED
    if isinstance(value, dict):
        return {name: _cut(inner, most) for name, inner in value.items()}
    return [_cut(inner, most) for inner in value] if isinstance(value, list) else value
