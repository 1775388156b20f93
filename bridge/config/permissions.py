"""Find what everybody may change: whoever can write the configuration or the state decides what the process does.

A group may write: it is how operators share files, and a umask of 002 lets the group of every file write.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel

from bridge.config.base import Secret
from bridge.config.models import Config


def find_exposed(config: Config, role: str) -> Iterator[Path]:
    """Yield what everybody may write of a process: its configuration, the files that it names, and its state."""
    if sys.platform == "win32":  # permissions are lists there, of which stat shows nothing
        return
    files = [*([config.path] if config.path else ()), *_named_files(config)]
    folders = [config.state_dir, config.state_dir / role]
    for file in files:
        folders += [file.parent, Path(os.path.realpath(file)).parent]
    exposed = [file for file in files if _is_exposed(file, 0)]
    # In a folder with the sticky bit, such as /tmp, only its owner can replace a file.
    exposed += [folder for folder in folders if _is_exposed(folder, stat.S_ISVTX)]
    yield from dict.fromkeys(exposed)


def _is_exposed(path: Path, unless: int) -> bool:
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return False
    return bool(mode & stat.S_IWOTH) and not mode & unless


def _named_files(value: object) -> Iterator[Path]:
    """Yield the files that settings name: of secrets, certificates and keys."""
    if isinstance(value, Secret) and value.file:
        yield value.file
    elif isinstance(value, BaseModel):
        for name, inner in value:
            if isinstance(inner, Path) and name.endswith("_file"):
                yield inner
            else:
                yield from _named_files(inner)
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _named_files(inner)
