"""The base of all settings: frozen models, and secrets from files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator

log = logging.getLogger(__name__)
T = TypeVar("T")

DAY_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class Secret:
    """A secret, or the file that holds it. It is never shown; the file is read again on every use."""

    value: str = field(default="", repr=False)
    file: Path | None = None

    def read(self) -> str:
        """Return the current secret.

        Raises:
            OSError, ValueError: its file cannot be read, is empty or is not text.
        """
        if self.file is None:
            return self.value
        try:
            text = self.file.read_text(encoding="utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise ValueError(f"expected UTF-8 text in {self.file}{hint_of_encoding(error)}") from None
        if not text:
            raise ValueError(f"expected text in {self.file}, which is empty")
        return text


def hint_of_encoding(error: UnicodeDecodeError) -> str:
    """Return how to save a text that Windows PowerShell has written as UTF-16, "" if it is something else."""
    is_utf_16 = error.object[:2] in (b"\xff\xfe", b"\xfe\xff")
    return ", but it is UTF-16: save it with Set-Content -Encoding utf8" if is_utf_16 else ""


def read_or_keep(read: Callable[[], T], known: T) -> T:
    """Return what `read` makes of secret files, or `known` if one of them cannot be used."""
    try:
        return read()
    except (OSError, ValueError) as error:
        log.warning("a secret file cannot be used; keeping the previous value: %s", error)
        return known


class VariableText(str):
    """The value of an environment variable, which is a text also where a number or a boolean is meant."""

    __slots__ = ()


Fault = tuple[str, str]
"""What is wrong with a part of the configuration: the key below the part, "" for all of it, and the reason."""


class Faults(ValueError):
    """Everything that is wrong with a part of the configuration."""

    def __init__(self, found: Sequence[Fault]) -> None:
        self.found = found
        super().__init__("; ".join(": ".join(filter(None, fault)) for fault in found))


def try_setting(key: str, check: Callable[[], object]) -> Iterator[Fault]:
    """Yield the fault that a check of a setting raises as a ValueError, if it does."""
    try:
        check()
    except ValueError as error:
        yield key, str(error)


def spellings(name: str) -> tuple[str, ...]:
    """Return every spelling of a setting's key."""
    alike = ("signing_secrets", "signing_secret")
    return alike if name in alike else (name,)


def _one_a_line(value: Any) -> Any:
    """Write a list of secrets or a table of headers as a file would hold it; other values than texts stay."""
    texts = [*value.values()] if isinstance(value, dict) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        return texts
    lines = [f"{name}: {text}" for name, text in value.items()] if isinstance(value, dict) else texts
    return "\n".join(lines)


_PLAIN_TYPES = {bool: "true or false", int: "a whole number", float: "a number"}


class Settings(BaseModel):
    """The base of every part: frozen, without unknown keys, and with `x_file` for every secret `x`.

    A secret is annotated with the function that refuses a wrong one.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False, defer_build=True
    )

    @model_validator(mode="before")
    @classmethod
    def _take_secrets(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        taken = dict(given)
        for name in cls.secret_names():
            value, file = _one_a_line(taken.pop(name, None)), taken.pop(f"{name}_file", None)
            if file is not None:
                taken[name] = Secret("" if value is None else str(value), Path(str(file)))
            elif value is not None:
                taken[name] = Secret(value) if isinstance(value, str) else value
        return taken

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_other_types(cls, given: Any, info: ValidationInfo) -> Any:
        """Refuse texts and booleans where a number is meant, and all but booleans where one is: pydantic converts."""
        wanted = next((plain for plain in _PLAIN_TYPES if plain in cls._types_of(str(info.field_name))), None)
        is_other = isinstance(given, str) or isinstance(given, bool) is not (wanted is bool)
        if wanted and is_other and not isinstance(given, VariableText):
            raise ValueError(f"expected {_PLAIN_TYPES[wanted]}")
        return given

    @field_validator("*")
    @classmethod
    def _check_secret(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, Secret):
            if value.file and value.value:
                raise ValueError("expected either the value or its file, not both")
            try:
                text = value.read()
            except OSError as error:
                raise ValueError(f"expected a file that can be read: {error.strerror}") from None
            for check in cls.model_fields[str(info.field_name)].metadata:
                check(text)
        return value

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if found := list(self.find_faults()):
            raise Faults(found)
        return self

    def find_faults(self) -> Iterator[Fault]:
        """Yield what is wrong with settings that are right each on its own."""
        yield from ()

    @classmethod
    def secret_names(cls) -> list[str]:
        """Return the names of the settings that are secrets, in every spelling."""
        return [key for name in cls.model_fields if Secret in cls._types_of(name) for key in spellings(name)]

    @classmethod
    def known_keys(cls) -> list[str]:
        """Return every key that is allowed."""
        secrets = cls.secret_names()
        return [*dict.fromkeys((*cls.model_fields, *secrets, *(f"{name}_file" for name in secrets)))]

    @classmethod
    def inner_settings(cls, name: str) -> type[Settings] | None:
        """Return the settings of the table or the tables that a setting is, None if it is a value."""
        types = cls._types_of(name) if name in cls.model_fields else []
        return next((one for one in types if isinstance(one, type) and issubclass(one, Settings)), None)

    @classmethod
    def _types_of(cls, name: str) -> list[Any]:
        annotation = cls.model_fields[name].annotation
        return [annotation, *(getattr(one, "__origin__", one) for one in get_args(annotation))]
