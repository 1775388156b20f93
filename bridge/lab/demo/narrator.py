"""Print the demo in 80 columns, with bold words on a terminal, at a speed that a person can read."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Callable

from bridge.runtime.text import escape

WIDTH = 79
WORD_WIDTH = 8
INDENT = " " * (9 + WORD_WIDTH + 2)  # the time and the word
TEXT_WIDTH = WIDTH - len(INDENT) - 1  # an emoji takes two columns
READ_LETTERS_PER_SECOND = 45.0
READ_LINE_SECONDS = 0.3
LOOK_SECONDS = 0.05


class Narrator:
    """Prints paragraphs and lines, and waits until they can have been read.

    Args:
        fast: whether not to wait.
    """

    def __init__(self, *, fast: bool) -> None:
        self._fast = fast
        self._started_at = time.monotonic()
        self._read_at = self._started_at
        self._is_terminal = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def heading(self, text: str) -> None:
        """Print a heading."""
        self._print(f"\n{self._bold(text)}")

    def paragraphs(self, text: str) -> None:
        """Print paragraphs, which an empty line separates."""
        for paragraph in text.split("\n\n"):
            self._print("\n" + textwrap.fill(escape(paragraph), WIDTH, break_on_hyphens=False))
        self._read_for(len(text) / READ_LETTERS_PER_SECOND)

    def table(self, rows: dict[str, str]) -> None:
        """Print a heading for each row, and what it means."""
        for word, text in rows.items():
            self._print(f"  {self._bold(word.ljust(WORD_WIDTH))}  {text}")
        self._read_for(len(rows) * READ_LINE_SECONDS)

    def line(self, word: str, text: str) -> None:
        """Print what happened, with the time since the start, on several lines if it is long."""
        filled = textwrap.fill(escape(text), TEXT_WIDTH, break_on_hyphens=False)
        seconds = time.monotonic() - self._started_at
        name = self._bold(word.ljust(WORD_WIDTH))
        self._print(f"{seconds:5.1f} s  {name}  {filled}".replace("\n", "\n" + INDENT))
        self._read_for(READ_LINE_SECONDS)

    def pause(self, look: Callable[[], object]) -> None:
        """Wait until what was printed can have been read; call `look` again and again."""
        while not self._fast and time.monotonic() < self._read_at:
            look()
            time.sleep(LOOK_SECONDS)

    def _read_for(self, seconds: float) -> None:
        self._read_at = max(self._read_at, time.monotonic()) + seconds

    def _bold(self, text: str) -> str:
        return f"\033[1m{text}\033[0m" if self._is_terminal else text

    def _print(self, text: str) -> None:
        print(text, flush=True)
