"""Record `imds-bridge demo` as an animated picture: `python -m tools.pictures.record FILE.svg [OPTION...]`.

The options are those of the demo. Only the standard library draws: the picture is one column of text that moves up,
so that the last line printed stands at the bottom. Without animation it shows the end.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

COLUMNS, ROWS = 80, 30
CHARACTER_WIDTH, LINE_HEIGHT, MARGIN = 8.43, 19, 14  # pixels, at a font size of 14
END_SECONDS = 8.0  # before it starts again
WIDTH = round(COLUMNS * CHARACTER_WIDTH) + 2 * MARGIN
HEIGHT = ROWS * LINE_HEIGHT + 2 * MARGIN
_SGR = re.compile(r"\x1b\[([0-9;]*)m")
_OTHER_ESCAPE = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|.)")
_COLOURS = {31: "ff7b72", 32: "7ee787", 33: "e3b341", 34: "79c0ff", 35: "d2a8ff", 36: "76e3ea"}
_STYLE = """\
rect{fill:#0d1117}
text{fill:#d1d7e0;font:14px ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre}
.s1{font-weight:bold}.s2{fill:#8b949e}"""


class Line(NamedTuple):
    """A line as it was printed, with its escape sequences, and when: seconds since the start."""

    at: float
    text: str


def record(command: Sequence[str]) -> Iterator[Line]:
    """Run a command on a terminal; give each line that it prints.

    Raises:
        RuntimeError: it failed.
    """
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    started_at = time.monotonic()
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    with process:
        os.close(theirs)
        for text in _lines(ours):
            yield Line(at=time.monotonic() - started_at, text=text)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {process.returncode}")


def _lines(terminal: int) -> Iterator[str]:
    with open(terminal, "rb") as output, suppress(OSError):  # Linux reports the end of a terminal so
        for line in iter(output.readline, b""):
            yield line.decode().rstrip("\r\n")


def svg(title: str, lines: Sequence[Line]) -> str:
    """Draw lines as an animated SVG.

    Args:
        title: a description for those who do not see it.
        lines: in the order of their times.
    """
    seconds = lines[-1].at + END_SECONDS
    frames, rows = [], []
    for number, line in enumerate(lines, start=1):
        frames.append(f"{100 * line.at / seconds:.2f}%{{transform:translateY({_offset(number)}px)}}")
        rows.append(f'<text x="{MARGIN}" y="{number * LINE_HEIGHT}">{_styled(line.text)}</text>')
    colours = (f".s{code}{{fill:#{colour}}}" for code, colour in _COLOURS.items())
    end = f"translateY({_offset(len(lines))}px)"
    animation = f"g{{transform:{end};animation:up {seconds:.1f}s step-end infinite}}"
    still = "@media(prefers-reduced-motion:reduce){g{animation:none}}"
    keyframes = (
        f"@keyframes up{{0%{{transform:translateY({_offset(0)}px)}}{''.join(frames)}100%{{transform:{end}}}}}"
    )
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    inner = f'y="{MARGIN}" width="{WIDTH}" height="{HEIGHT - 2 * MARGIN}"'  # cuts off what is not printed yet
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" xml:space="preserve">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}{''.join(colours)}{animation}{still}{keyframes}</style>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8"/><svg {inner}><g>',
            *rows,
            "</g></svg></svg>\n",
        ]
    )


def _offset(count: int) -> int:
    """Return how far to move the lines down so that `count` of them are to be seen."""
    return ROWS * LINE_HEIGHT - count * LINE_HEIGHT - LINE_HEIGHT // 4


def _styled(text: str) -> str:
    """Return a line with its colours."""
    plain, *rest = _SGR.split(text)
    parts = [escape(_OTHER_ESCAPE.sub("", plain))]
    for codes, part in zip(rest[::2], rest[1::2], strict=True):
        names = " ".join(f"s{int(code)}" for code in codes.split(";") if code.strip("0"))
        shown = escape(_OTHER_ESCAPE.sub("", part))
        parts.append(f'<tspan class="{names}">{shown}</tspan>' if names and shown else shown)
    return "".join(parts)


if __name__ == "__main__":
    arguments = ["demo", *sys.argv[2:]]
    shown = f"imds-bridge {' '.join(arguments)}"
    recorded = record([sys.executable, "-m", "bridge", *arguments])
    lines = [Line(at=0.0, text=f"\x1b[1m$ {shown}\x1b[0m"), *recorded]
    Path(sys.argv[1]).write_text(svg(f"A recording of {shown}", lines), encoding="utf-8")
