"""Publish every change of Azure's Scheduled Events as CloudEvents, and approve events over a bus."""

from pathlib import Path

try:
    # The build writes it. importlib.metadata would add 20 ms to every start.
    __version__ = Path(__file__).with_name("version.txt").read_text(encoding="ascii").strip()
except FileNotFoundError:  # the source, never built
    __version__ = "0.0.0"
