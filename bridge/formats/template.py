"""Write an event as the operator's own JSON: a document whose texts are Jinja2 templates.

Each text is rendered on its own, so that no value can break the JSON. The author of a template is trusted, values are
not: a template reaches nothing of Python, and no value is evaluated.

I/O: the file in `template_file`, once.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, tzinfo
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from jinja2 import ChainableUndefined, Undefined, meta, nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import model_validator

from bridge.config.base import Fault, Faults
from bridge.config.sinks import ChatSettings, WebhookSettings
from bridge.config.values import nearest, quote_path
from bridge.contract.types import PROPERTIES
from bridge.events.filters import Filter
from bridge.formats.base import ChatFormat
from bridge.formats.samples import samples
from bridge.formats.text import instant_of
from bridge.runtime.json import Json
from bridge.runtime.time import iso_utc

FAILED = "(cannot be shown)"

_ROOTS = ("event", "data", "notice", "now")
_ONE_EXPRESSION = re.compile(r"\s*\{\{-?((?:(?!\}\}|\{\{|\{%).)+?)-?\}\}\s*", re.DOTALL)
_MENTIONS_OR_LINKS = re.compile(r"[@<]|\](?=\()")
# Objects whose names no event gives: those with any, such as `Tags`, and the loop of Jinja2.
_OPEN = {"loop", *(name.split(".")[-2] for name in PROPERTIES if name.endswith(".*"))}

Variables = Mapping[str, Any]


class _Exact(str):
    """A text that is shown as it came."""

    __slots__ = ()


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja2's own, but that null counts as missing, and a property is preferred to a method of its name."""

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return an object's value or a list's element."""
        value = super().getitem(obj, argument)
        return self.undefined(name=str(argument)) if value is None else value

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an object's value."""
        return self.getitem(obj, attribute)


@dataclass(frozen=True)
class _Text:
    """A text of the template: what fills it, the names that it reads, and the variables in which it begins."""

    fill: Callable[[Variables], Json]
    names: set[str]
    roots: set[str]

    def find_fault(self, every: Mapping[str, Variables]) -> Iterator[str]:
        """Yield why it fails for one of the events."""
        for type_, variables in every.items():
            try:
                self.fill(variables)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the template's fault
                yield f"fails for {type_}: {error}"
                return


def _text(value: Any) -> str:
    """Write a value as text: null as nothing, and every other value than a text as JSON."""
    if isinstance(value, str | Undefined):
        return str(value)
    return "" if value is None else _tojson(value)


def _shown(value: Any) -> str:
    """Write a value so that it mentions no one and links nowhere: an invisible space follows `@`, `<` and `](`."""
    return value if isinstance(value, _Exact) else _MENTIONS_OR_LINKS.sub("\\g<0>\u200b", _text(value))


def _valid(value: Any) -> Json:
    """Bring a value into JSON that any receiver can read: no half characters, no endless numbers."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_valid(str(name)): _valid(inner) for name, inner in value.items()}
    if isinstance(value, bool | int | None):
        return value
    return None if isinstance(value, Undefined) else [_valid(inner) for inner in value]


def _tojson(value: Any) -> str:
    return json.dumps(_valid(value), ensure_ascii=False)


def _local_time(zone: tzinfo, value: Any, form: str = "%Y-%m-%d %H:%M %Z") -> str:
    instant = instant_of(value)
    return instant.astimezone(zone).strftime(form) if instant else _text(value)


class TemplateSettings(ChatSettings, WebhookSettings):
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
        super().__init__(settings)
        zone = settings.zone or UTC
        self._jinja = _Sandbox(undefined=ChainableUndefined, finalize=_shown, keep_trailing_newline=True)
        self._jinja.filters |= {
            "exact": lambda value: _Exact(_text(value)),
            "tojson": _tojson,
            "local_time": partial(_local_time, zone),
        }
        self._texts: dict[str, _Text] = {}
        self._shape = self._compile(settings.template, "template")

    def check(self, now: datetime) -> None:
        """Try the template on a sample of every type that will come.

        Raises:
            ValueError: it names what none of them has, or fails for one; says where, and what comes near.
        """
        taken = Filter(types=self._settings.types)
        every = {
            sample.type: self._variables(sample.envelope, now)
            for sample in samples(now)
            if taken.matches_type(sample.type)
        }
        known = {name for variables in every.values() for name in _names(variables)}
        full = {f"{root}.{name}" for one in every.values() for root in _ROOTS[:3] for name in one[root] or ()}
        faults: list[str] = []
        for path, text in self._texts.items():
            unknown = [(name, known) for name in sorted(text.names - known)]
            for name in sorted(text.roots.difference(_ROOTS)):
                unknown.append((name, {one for one in full if one.endswith(f".{name}")} or {*_ROOTS}))
            for name, near in unknown:
                hint = nearest(name, near) or f"; there are {', '.join(_ROOTS)}"
                faults.append(f"{path}: {name} is in no event that this sink takes{hint}")
            faults += [f"{path}: {fault}" for fault in text.find_fault(every)]
        if faults:
            raise ValueError("; ".join(faults))

    def write(self, event: Mapping[str, Json], now: datetime) -> Json:
        """Return the JSON for an event; a text that fails for it says so in its place."""
        return _fill(self._shape, self._variables(event, now))

    def _variables(self, event: Mapping[str, Json], now: datetime) -> Variables:
        return {
            "event": {name: value for name, value in event.items() if name != "data"},
            "data": event.get("data"),
            "notice": asdict(self._notice(event, now)),
            "now": iso_utc(now),
        }

    def _compile(self, shape: Json, path: str) -> Any:
        """Put a compiled text in the place of every text."""
        if isinstance(shape, dict):
            return {name: self._compile(inner, f"{path}.{name}") for name, inner in shape.items()}
        if isinstance(shape, list):
            return [self._compile(inner, f"{path}[{index}]") for index, inner in enumerate(shape)]
        if not isinstance(shape, str):
            return shape
        try:
            self._texts[path] = _Text(self._function(shape), *self._names_read(shape))
        except TemplateSyntaxError as error:
            raise ValueError(f"{path}, line {error.lineno}: {error.message}") from None
        return self._texts[path]

    def _function(self, text: str) -> Callable[[Variables], Json]:
        if one := _ONE_EXPRESSION.fullmatch(text):
            value = self._jinja.compile_expression(one[1].strip())
            return lambda variables: _of_one(value(**variables))
        compiled = self._jinja.from_string(text)
        return lambda variables: _valid(compiled.render(variables))

    def _names_read(self, text: str) -> tuple[set[str], set[str]]:
        """Name what a text reads, apart from what it tests first or has a default for, and its variables."""
        tree = self._jinja.parse(text)
        tested: list[Any] = [one.node for one in tree.find_all(nodes.Test)]
        tested += [one.test for one in tree.find_all(nodes.If)]
        tested += [one.test for one in tree.find_all(nodes.CondExpr)]
        tested += [one.node for one in tree.find_all(nodes.Filter) if one.name in ("default", "d")]
        roots = meta.find_undeclared_variables(tree) - self._jinja.globals.keys()
        return {*_read(tree)} - {*_read(nodes.Output(tested))}, roots


def _of_one(value: Any) -> Json:
    """Write the value of one expression: a list or an object is data, and passes as it came."""
    return _valid(_shown(value) if isinstance(value, str) else value)


def _fill(shape: Any, variables: Variables) -> Json:
    if isinstance(shape, dict):
        return {name: _fill(inner, variables) for name, inner in shape.items()}
    if isinstance(shape, list):
        return [_fill(inner, variables) for inner in shape]
    if not isinstance(shape, _Text):
        return shape
    try:
        return shape.fill(variables)
    except Exception:  # noqa: BLE001 - a value that the template does not expect must not cost the notice
        return FAILED


def _read(tree: nodes.Node) -> Iterator[str]:
    """Name the properties that expressions read, but those of the objects in `_OPEN`."""
    read: list[tuple[nodes.Expr, Any]] = [(one.node, one.attr) for one in tree.find_all(nodes.Getattr)]
    read += [(one.node, getattr(one.arg, "value", None)) for one in tree.find_all(nodes.Getitem)]
    for owner, name in read:
        if isinstance(name, str) and not {getattr(owner, "attr", ""), getattr(owner, "name", "")} & _OPEN:
            yield name


def _names(value: Json) -> Iterator[str]:
    """List all names in a value, at any depth."""
    if isinstance(value, Mapping):
        yield from value
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _names(inner)
