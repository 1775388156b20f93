"""Play the story of the demo, and check that everything has arrived."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import NoReturn

from bridge.lab.demo.narrator import Narrator
from bridge.lab.demo.stage import WAIT_SECONDS, Stage
from bridge.lab.demo.story import (
    INTRODUCTION,
    NEXT,
    Chapter,
    chapters,
    expected_events,
    legend,
)
from bridge.runtime.text import show
from bridge.runtime.threads import STOP_SIGNALS


def demonstrate(*, with_bus: bool, fast: bool) -> int:
    """Play the story; return 0 only if everything arrived.

    Args:
        with_bus: whether to simulate a Service Bus and to approve over it.
        fast: whether to leave out the pauses.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, _interrupt)
    try:
        with tempfile.TemporaryDirectory(prefix="imds-bridge-demo-") as folder, ExitStack() as stack:
            return _demonstrate(stack, Path(folder), Narrator(fast=fast), with_bus=with_bus)
    except KeyboardInterrupt:
        show("demo: stopped", stream=sys.stderr)
        return 1


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    """End the demo; a second signal must not keep it from ending its processes."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _demonstrate(stack: ExitStack, folder: Path, narrate: Narrator, *, with_bus: bool) -> int:
    bus = None
    if with_bus:
        from bridge.lab.demo.bus import DemoBus  # noqa: PLC0415 - it needs the extra `lab`

        bus = stack.enter_context(DemoBus())
    stage = Stage(stack, folder, narrate, bus)
    narrate.paragraphs(f"{INTRODUCTION}\n\nThe left column:")
    narrate.table(legend(with_bus=with_bus))
    for number, chapter in enumerate(chapters(with_bus=with_bus), 1):
        narrate.heading(f"{number}. {chapter.title}")
        if not _play(chapter, stage, narrate):
            stage.faults.append(f"chapter {number}: not every event arrived within {WAIT_SECONDS:g} s")
            break
    return _conclude(stage, narrate, expected_events(with_bus=with_bus))


def _play(chapter: Chapter, stage: Stage, narrate: Narrator) -> bool:
    """Play one step after the other; return whether the events of each arrived."""
    for step in chapter.steps:
        if step.text:
            narrate.paragraphs(step.text)
            narrate.pause(stage.look)
        if step.act:
            step.act(stage)
        if not stage.expect(step.causes):
            return False
        narrate.pause(stage.look)
    return True


def _conclude(stage: Stage, narrate: Narrator, expected: Counter[str]) -> int:
    """Print what has arrived, and what to do next or what is wrong; return the exit code."""
    published, arrived = stage.published(), stage.listeners.arrived()
    faults = [*stage.faults, *find_faults(expected, published, arrived)]
    if faults:
        show(*stage.logs(), stream=sys.stderr)
        show("", f"demo: FAILED, {'; '.join(faults)}")
        return 1
    received = ", ".join(f"{len(ids)} by {place}" for place, ids in arrived.items())
    narrate.paragraphs(
        f"{len(published)} events were published, and received: {received}. The chat channel has "
        f"{len(stage.listeners.chat())} messages.\n\nWhat to do next:"
    )
    for arguments, text in NEXT:
        show(f"  {_command()} {arguments}", f"      {text}")
    show("", f"demo: ok, {len(published)} published, 0 lost")
    return 0


def find_faults(
    expected: Counter[str], published: Mapping[str, str], arrived: Mapping[str, Collection[str]]
) -> list[str]:
    """Describe what is missing or too much.

    Args:
        expected: how many events of each type the story causes.
        published: the type of each event by id.
        arrived: the ids that each listener has got.
    """
    seen = Counter(published.values())
    return [
        *(f"{name}: {count} missing" for name, count in (expected - seen).items()),
        *(f"{name}: {count} too many" for name, count in (seen - expected).items()),
        *(
            f"{count} of {len(published)} events lost on the way to {place}"
            for place, ids in arrived.items()
            if (count := len(published.keys() - set(ids)))
        ),
    ]


def _command() -> str:
    """Return how this program is called here."""
    path = Path(sys.argv[0])
    if path.name != "imds-bridge":
        return "imds-bridge"
    return path.name if shutil.which(path.name) else os.path.relpath(path)
