"""The JSON Schemas and an example of each type: the files in `schemas/`, which a wheel has as `bridge/schemas`.

I/O: reads these files.
"""

from __future__ import annotations

from pathlib import Path

from bridge.contract.types import EVENT_NAMES, TYPE_PREFIX
from bridge.errors import UsageError

CLOUDEVENT, STATUS = "cloudevent", "status"
NAMES = (*EVENT_NAMES, CLOUDEVENT, STATUS)

_PACKAGE = Path(__file__).resolve().parents[1]
_FOLDER = next(folder for folder in (_PACKAGE / "schemas", _PACKAGE.parent / "schemas") if folder.is_dir())


def file_name(name: str) -> str:
    """Return the name of the files of a type: its schema, and its example."""
    return f"{name}.v1.json"


def schema(name: str) -> bytes:
    """Return the content of one schema file.

    Args:
        name: `cloudevent`, `status`, or a type such as `scheduledevent.started`, also with `io.imdsbridge.`, `.v1`.

    Raises:
        UsageError: the type does not exist.
    """
    short = name.removeprefix(TYPE_PREFIX).removesuffix(".v1")
    if short not in NAMES:
        raise UsageError(f"schema: given {name}, expected one of {', '.join(NAMES)}")
    return (_FOLDER / file_name(short)).read_bytes()


def example(name: str) -> bytes:
    """Return a whole event of a type, as a process published it."""
    return (_FOLDER / "examples" / file_name(name)).read_bytes()
