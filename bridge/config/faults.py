"""Validate one part of the configuration; describe each error with its key, its value and what was expected."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from bridge.config.base import Secret, SecretUnreadable, Settings
from bridge.config.names import nearest
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
        faults += [_fault(model, where, details) for details in error.errors(include_url=False)]
        return None


def _kind(value: object) -> str:
    """Quote what was given instead of a table, but no text: it may be a broken table with secrets."""
    return "a text" if isinstance(value, str) else quote(value)


def _fault(model: type[Settings], where: str, details: ErrorDetails) -> str:
    path = [str(step) for step in details["loc"]]
    name = path[0] if path else ""
    key = ".".join(filter(None, [where, *path])).replace("signing_secrets", "signing_secret")
    if details["type"] == "extra_forbidden":
        return f"{key}: unknown key{model.hint(name) or nearest(name, model.known_keys())}"
    if details["type"] == "missing":
        also = f" (or {name}_file)" if f"{name}_file" in model.known_keys() else ""
        return f"{key}: is missing{also}"
    expected = details["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    expected = _PLAINER.get(details["type"], expected)
    # An error of the part as a whole, or of a secret in it.
    if not path:
        return f"{key or 'the file'}: {expected}"
    given = details["input"]
    if isinstance(given, Secret) and given.file:
        text = f"{key}_file: given {quote_path(given.file)}, {expected}"
        return SecretFault(text) if isinstance(details["ctx"]["error"], SecretUnreadable) else text
    shown = "***" if name in model.secret_names() or name.endswith("_file") else quote(given)
    return f"{key}: given {shown}, {expected}"


_PLAINER = {
    "tuple_type": 'expected a list, for example ["a", "b"]',
    "mapping_type": "expected a table",
    "dataclass_type": "expected a text",
    "path_type": "expected a path",
    "string_type": "expected a text",
}
