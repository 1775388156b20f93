"""The stores and the consoles that several files of this folder ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.console import RunningConsole, Shown, behind_proxy, console_at, shown


@pytest.fixture
def seen(tmp_path: Path) -> Iterator[Shown]:
    """Return an empty store, and its pages, at NOW."""
    with shown(tmp_path) as opened:
        yield opened


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningConsole]:
    """Return a console at NOW that nobody stops; tests use names of their own."""
    with console_at(tmp_path_factory.mktemp("console")) as running:
        yield running


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningConsole]:
    """Return a console behind a proxy, for the group `staff`."""
    settings = behind_proxy(viewer_groups=["staff"])
    with console_at(tmp_path_factory.mktemp("guarded"), **settings) as running:
        yield running
