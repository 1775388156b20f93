"""The names of all properties of events' data, read from the models when first asked for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, get_args, get_origin

from pydantic import BaseModel

ANY_NAME = ".*"


@cache
def property_names() -> tuple[str, ...]:
    """Return the names of all properties, with dots into objects: `EventType`, `Vm.Name`, `Command.Id`.

    An object whose names are not fixed, such as `Vm.Tags`, has the further name `Vm.Tags.*`.
    """
    from bridge.contract.data import DATA  # noqa: PLC0415 - defining the models takes 20 ms, few starts need them

    return tuple(dict.fromkeys(name for model in DATA.values() for name in _names(model)))


def is_property(name: str) -> bool:
    """Return whether some event's data can have the property `name`, with dots into objects."""
    known = property_names()
    parts = name.split(".")
    objects = (".".join(parts[:end]) for end in range(1, len(parts)))
    return name in known or any(f"{outer}{ANY_NAME}" in known for outer in objects)


def _names(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield name
        yield from (f"{name}.{inner}" for inner in _inner_names(field.annotation))


def _inner_names(annotation: Any) -> Iterator[str]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from _names(annotation)
    elif get_origin(annotation) is dict:
        yield ANY_NAME.removeprefix(".")
    elif get_origin(annotation) is not list:  # `where` does not look into lists of objects
        for choice in get_args(annotation):
            yield from _inner_names(choice)
