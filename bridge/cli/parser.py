"""The parser of every command."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

from bridge.config.values import nearest

HELP_COLUMN = 30


class Parser(argparse.ArgumentParser):
    """Keeps the lines of descriptions and examples, and names the option that a mistyped one may mean."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=_formatter, **settings)

    # The overloads of argparse differ only in the type of the namespace.
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parse the arguments; an unknown option is an error of the command that it was given to."""
        result, unknown = super().parse_known_args(args, namespace)
        if options := [one for one in unknown if one.startswith("-")]:
            known = re.findall(r"--[a-z-]+", self.format_usage())
            self.error(f"unknown option {options[0]!a}{nearest(options[0].partition('=')[0], known)}")
        return result, unknown


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=HELP_COLUMN)
