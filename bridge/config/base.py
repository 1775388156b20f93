"""What every part's settings are made of: frozen models, secrets from files, and what every sink has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationInfo,
    field_validator,
    model_validator,
)

DAY_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class Secret:
    """A secret, or the file that holds it; never shown, and read anew whenever it is asked for."""

    value: str = field(default="", repr=False)
    file: Path | None = None

    def read(self) -> str:
        """Return the secret as it stands now.

        Raises:
            OSError, ValueError: its file cannot be read, is empty or is no text.
        """
        if self.file is None:
            return self.value
        try:
            text = self.file.read_text(encoding="utf-8-sig").strip()
        except UnicodeDecodeError:
            raise ValueError(f"{self.file} is no UTF-8 text") from None
        if not text:
            raise ValueError(f"{self.file} is empty")
        return text


class Settings(BaseModel):
    """The base of every part: frozen, no unknown keys, and `x_file` wherever `x` is a secret."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False, defer_build=True
    )

    secret_checks: ClassVar[Mapping[str, Callable[[str], object]]] = {}
    """What refuses a secret's text, by the setting's name."""

    @model_validator(mode="before")
    @classmethod
    def _take_secrets(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        taken = dict(given)
        for name in cls.secret_names():
            file, value = taken.pop(f"{name}_file", None), taken.get(name)
            if file is not None:
                taken[name] = Secret(value="" if value is None else str(value), file=Path(str(file)))
            elif isinstance(value, str):
                taken[name] = Secret(value)
        return taken

    @field_validator("*")
    @classmethod
    def _check_secret(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, Secret):
            if value.file and value.value:
                raise ValueError(f"expected either {info.field_name} or {info.field_name}_file, not both")
            text = _read(value)
            if check := cls.secret_checks.get(str(info.field_name)):
                check(text)
        return value

    @classmethod
    def secret_names(cls) -> list[str]:
        """Name the settings that are secrets."""
        return [
            name
            for name, info in cls.model_fields.items()
            if info.annotation is Secret or Secret in get_args(info.annotation)
        ]

    @classmethod
    def known_keys(cls) -> list[str]:
        """Name every key that may be written."""
        return [*cls.model_fields, *(f"{name}_file" for name in cls.secret_names())]

    @classmethod
    def hint(cls, key: str) -> str:  # noqa: ARG003 - for those that know more
        """Return where an unknown key belongs, "" if nowhere."""
        return ""


class SecretUnreadable(ValueError):
    """The file of a secret cannot be read, by this user or at all."""


def _read(secret: Secret) -> str:
    try:
        return secret.read()
    except OSError as error:
        raise SecretUnreadable(f"expected a file that can be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"expected a file that holds the secret: {error}") from None
