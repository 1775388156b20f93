"""Check what a sink's `types` and `where` name, against the contract."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from bridge.config.names import nearest
from bridge.config.validators import quote
from bridge.contract.types import ATTRIBUTES, EVENT_TYPES, KNOWN_VALUES, PROPERTIES, is_property


def expression_of(pattern: str) -> str:
    """Return the regular expression of a pattern with `*` for any text, which takes linear time."""
    first, *others = map(re.escape, pattern.split("*"))
    if not others:
        return first
    # The first place that fits is as good as any later one, so nothing is tried twice.
    return first + "".join(f"(?>.*?{text})" for text in others[:-1]) + f".*{others[-1]}"


def check_pattern(pattern: str) -> str:
    """Refuse a pattern that matches no type of event.

    Raises:
        ValueError: with the nearest type.
    """
    expression = expression_of(pattern)
    if not any(re.fullmatch(expression, known) for known in EVENT_TYPES):
        families = {f"{known.rsplit('.', 2)[0]}.*" for known in EVENT_TYPES}
        hint = nearest(pattern, [*EVENT_TYPES, *sorted(families)]) or f", for example {EVENT_TYPES[0]}"
        raise ValueError(f"expected existing event types{hint}")
    return pattern


def check_name(name: str) -> None:
    """Refuse what is neither an attribute nor a property of any event's data.

    Raises:
        ValueError: with the nearest name.
    """
    if name in ATTRIBUTES or is_property(name):
        return
    hint = nearest(name, [*ATTRIBUTES, *PROPERTIES]) or ", such as EventType or AffectsThisVm"
    raise ValueError(f"{name}: expected an attribute or a property of an event's data{hint}")


def check_outcomes(values: Sequence[Any]) -> None:
    """Refuse an Outcome that no receipt has: unlike IMDS's values, these are imds-bridge's own.

    Raises:
        ValueError: with those that exist.
    """
    known = KNOWN_VALUES["Outcome"]
    for value in values:
        if value not in known:
            raise ValueError(
                f"Outcome: given {quote(value)}, expected one of {', '.join(known)}{nearest(value, known)}"
            )
