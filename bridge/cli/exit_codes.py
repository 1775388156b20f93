"""The exit codes of every command."""

from __future__ import annotations

OK = 0
UNEXPECTED = 1
USAGE = 2
FAILED = 3
