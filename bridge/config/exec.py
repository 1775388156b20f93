"""The settings of a sink that runs a program, and the check of what a program may be."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from bridge.config.sinks import SinkSettings


def _check_program(value: tuple[str, ...]) -> tuple[str, ...]:
    if not value or not value[0].startswith("/") or any("\0" in part for part in value):
        raise ValueError(
            'expected an absolute path and its arguments, for example ["/usr/local/bin/drain", "-v"]'
        )
    if sys.platform == "win32":
        raise ValueError("programs are not supported on Windows")
    return value


Program = Annotated[tuple[str, ...], AfterValidator(_check_program)]
RunSeconds = Annotated[float, Field(gt=0, le=86_400)]


class ExecSettings(SinkSettings):
    """Run a program for each event, by default of those that may affect this VM.

    It gets the CloudEvent on standard input.
    """

    kind: Literal["exec"]
    run: Program
    """The program, by its absolute path, and its arguments; no shell is involved. Example:
    `["/usr/local/bin/notify", "--quiet"]`."""
    timeout_seconds: RunSeconds = 30.0
    """How long the program may run; then its process group gets SIGTERM, and SIGKILL 5 s later. Example: `60`."""
