"""Validate one part of the configuration; describe each error with its key, its value and what was expected."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from bridge.config.base import Faults, Secret, SecretUnreadable, Settings
from bridge.config.names import closest, nearest
from bridge.config.tables import tables
from bridge.config.validators import quote, quote_path
from bridge.errors import SecretFault

S = TypeVar("S", bound=Settings)


def load_part(model: type[S], given: Any, where: str, faults: list[str]) -> S | None:
    """Validate one part of the configuration.

    Args:
        model: its settings.
        given: what was written.
        where: its key, "" for the top level.
        faults: gets a line for each error.
    """
    if not isinstance(given, dict):
        faults.append(f"{where}: given {_kind(given)}, expected a table: [{where}]")
        return None
    try:
        return model(**given)
    except ValidationError as error:
        found = error.errors(include_url=False)
        texts = [text for details in found for text in _describe(model, where, details)]
        texts += _find_hidden(model, given, where, found)
        faults += dict.fromkeys(texts)
        return None


def _kind(value: object) -> str:
    """Quote what was given instead of a table, but no text: it may be a broken table with secrets."""
    return "a text" if isinstance(value, str) else quote(value)


def _find_hidden(
    model: type[Settings], given: Any, where: str, found: Sequence[ErrorDetails]
) -> Iterator[str]:
    """Yield the errors of settings together, which pydantic looks for only where each alone is right.

    They are looked for without the faulty ones, and do not count if they are about those.
    """
    for details in reversed(found):
        given = _without(given, details["loc"])
    about = {name for details in found for name in _about(model, details)}
    try:
        model(**given)
    except ValidationError as error:
        hidden = [one for one in error.errors(include_url=False) if isinstance(_cause(one), Faults)]
        for details in hidden:
            texts = _describe(model, where, details)
            yield from (text for text in texts if about.isdisjoint(re.findall(r"\w+", text)))
        if any(details["loc"] for details in hidden):
            yield from _find_hidden(model, given, where, hidden)


def _about(model: type[Settings], details: ErrorDetails) -> Iterator[str]:
    """Yield the key that an error is about, and the one that was meant."""
    settings, key = _owner(model, details["loc"])
    yield key
    yield closest(key, settings.known_keys()) or key


def _without(given: Any, path: Sequence[int | str]) -> Any:
    """Return tables and lists without what is at a path in them."""
    if not path:
        return given
    step, *rest = path
    if isinstance(given, dict):
        others = {key: inner for key, inner in given.items() if key not in (step, f"{step}_file")}
        return {**others, step: _without(given[step], rest)} if rest and step in given else others
    if isinstance(given, list) and isinstance(step, int):
        # An empty table stands for a faulty one: that there is one may matter.
        kept = [_without(given[step], rest)] if rest else [{}] if isinstance(given[step], dict) else []
        return [*given[:step], *kept, *given[step + 1 :]]
    return given


def _owner(model: type[Settings], path: Sequence[int | str]) -> tuple[type[Settings], str]:
    """Return the innermost settings that a path leads to, and the key in them, "" for all of them."""
    for step in path:
        if isinstance(step, str):
            inner = model.inner_settings(step)
            if inner is None:
                return model, step
            model = inner
    return model, ""


def _describe(model: type[Settings], where: str, details: ErrorDetails) -> Iterator[str]:
    cause = _cause(details)
    if isinstance(cause, Faults):
        for name, text in cause.found:
            yield f"{_key(where, [*details['loc'], *filter(None, [name])])}: {text}"
    else:
        yield _fault(model, where, details)


def _cause(details: ErrorDetails) -> object:
    return details.get("ctx", {}).get("error")


def _key(where: str, path: Sequence[int | str]) -> str:
    """Return the full name of a setting: `approvals.policy.allow[0].event_type`."""
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in path]
    return (
        "".join([where, *steps]).removeprefix(".").replace("signing_secrets", "signing_secret") or "the file"
    )


def _fault(model: type[Settings], where: str, details: ErrorDetails) -> str:
    settings, name = _owner(model, details["loc"])
    key = _key(where, details["loc"])
    if details["type"] == "extra_forbidden":
        return f"{key}: unknown key{_hint(settings, name, where)}"
    if details["type"] == "missing":
        also = f" (or {name}_file)" if f"{name}_file" in settings.known_keys() else ""
        return f"{key}: is missing{also}"
    expected = details["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    expected = _PLAINER.get(details["type"], expected)
    # An error of the part as a whole, or of a secret in it.
    if not details["loc"]:
        return f"{key}: {expected}"
    given = details["input"]
    if isinstance(given, Secret) and given.file:
        text = f"{key}_file: given {quote_path(given.file)}, {expected}"
        return SecretFault(text) if isinstance(_cause(details), SecretUnreadable) else text
    shown = "***" if name in settings.secret_names() or name.endswith("_file") else quote(given)
    return f"{key}: given {shown}, {expected}"


def _hint(settings: type[Settings], name: str, where: str) -> str:
    """Return the key that an unknown one is likely to mean: of the same table, else of another one."""
    if near := closest(name, settings.known_keys(), similarity=0.75):
        return f"; did you mean {near}?"
    elsewhere: dict[str, str] = {}
    section = where.partition(".")[0]
    for table in sorted(tables(), key=lambda table: table.name.partition(".")[0] != section):
        for key in table.settings.known_keys():
            elsewhere.setdefault(key, table.full_name(key))
    if far := closest(name, elsewhere, similarity=0.8):
        return f"; did you mean {elsewhere[far]}?"
    return nearest(name, settings.known_keys())


_PLAINER = {
    "tuple_type": 'expected a list, for example ["a", "b"]',
    "model_type": "expected a table",
    "mapping_type": "expected a table",
    "dataclass_type": "expected a text",
    "path_type": "expected a path",
    "string_type": "expected a text",
}
