"""Override settings by environment variables named `IMDS_BRIDGE__SECTION__KEY`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

ENV_PREFIX = "IMDS_BRIDGE__"


def override(given: dict[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Write the variables' values over the file's settings; return each key that was set with its variable."""
    variables: dict[str, str] = {}
    for variable, value in sorted(environ.items()):
        if not variable.upper().startswith(ENV_PREFIX):
            continue
        *sections, key = variable[len(ENV_PREFIX) :].lower().split("__")
        table = given
        for number, section in enumerate(sections):
            # The file may write a sink's name in any letter case.
            name = next((name for name in table if name.lower() == section), section)
            sections[number] = name
            inner = table.get(name)
            table[name] = dict(inner) if isinstance(inner, dict) else {}
            table = table[name]
        key = next((name for name in table if name.lower() == key), key)
        for name in _spellings(key.removesuffix("_file")):
            table.pop(name, None)
            table.pop(f"{name}_file", None)
        table[key] = _from_text(value)
        variables[".".join((*sections, key))] = variable
    return variables


def _spellings(name: str) -> tuple[str, ...]:
    """Return every spelling of a key, so that the environment's value replaces all of the file's."""
    alike = ("signing_secret", "signing_secrets")
    return alike if name in alike else (name,)


def _from_text(value: str) -> Any:
    """Parse lists and tables, which the environment holds as JSON; leave the rest to the setting's type."""
    if value[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            # A template such as {event} starts like JSON.
            return value
    return value


def name_variable(fault: str, variables: Mapping[str, str]) -> str:
    """Add to an error the environment variable that its value came from, if it came from one."""
    key = fault.partition(":")[0]
    while key and key not in variables:
        key = re.sub(r"(\[[^\[]*|(\A|\.)[^.\[]*)\Z", "", key)  # shorter in any case: a key may have brackets
    return type(fault)(f"{fault} (from the environment variable {variables[key]})") if key else fault
