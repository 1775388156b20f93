"""Run the soak test: changes and faults for some minutes, then the checks."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path

from tests.support.process import wait_until
from tests.support.usage import Usage
from tools.soak.checks import problems
from tools.soak.faults import Faults
from tools.soak.plan import Fault, plan
from tools.soak.report import summary
from tools.soak.traffic import Changes, Commands
from tools.soak.truth import Command, Evidence
from tools.soak.world import COMMANDS, GROUP, LANES, LISTENERS, SMALL_OUTBOX, World

CALM_SECONDS = 25.0  # of the given time are left for the recovery
RECOVERY_SECONDS = 300.0  # what it may take on a busy machine
READY_SECONDS = 60.0
PROGRESS_SECONDS = 10.0
SHOWN_PROBLEMS = 20
LOOKS = 4


def main() -> int:
    """Return 0 if everything held."""
    options = _options()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**32)
    seconds = options.minutes * 60 - CALM_SECONDS
    print(f"soak: {options.minutes:g} minutes, seed {seed} (--seed {seed} plans the same faults)", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="imds-bridge-soak-"))
    faults = plan(seed, seconds, LANES)
    with ExitStack() as stack:
        evidence, restarts = _run(stack, folder, seed, seconds, faults)
        found = problems(evidence)
    for line in summary(evidence, faults, restarts):
        print(line)
    for problem in found[:SHOWN_PROBLEMS]:
        print(f"PROBLEM: {problem[:2000]}")
    if found:
        (folder / "evidence.json").write_text(json.dumps(asdict(evidence), indent=1, default=sorted))
        print(f"soak: FAILED with {len(found)} problems, seed {seed}; logs are in {folder}")
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    print(f"soak: everything held, seed {seed}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.soak", description=__doc__)
    parser.add_argument("--minutes", type=_minutes, default=14.0, help="from 1 to 14 (default: 14)")
    parser.add_argument("--seed", type=int, help="chooses faults and changes (default: any)")
    return parser.parse_args()


def _minutes(text: str) -> float:
    if not 1 <= (minutes := float(text)) <= 14:
        raise argparse.ArgumentTypeError(f"given {text}, expected 1 to 14")
    return minutes


def _run(
    stack: ExitStack, folder: Path, seed: int, seconds: float, planned: list[Fault]
) -> tuple[Evidence, int]:
    """Return the evidence, and how often a process was started again."""
    world = stack.enter_context(World(stack, folder))
    ended = threading.Event()
    supervisor = threading.Thread(target=_supervise, args=[world, ended])
    supervisor.start()
    stack.callback(supervisor.join)
    stack.callback(ended.set)
    trouble = [*_unsettled(world, READY_SECONDS)]
    before, commands, failed = _disturb(world, seed, seconds, planned)
    print("all works again; waiting until everything is delivered", flush=True)
    trouble += [*failed, *_unsettled(world, RECOVERY_SECONDS)]
    after = world.usage()
    restarts = sum(len(member.starts) - 1 for member in world.members.values())
    world.members[SMALL_OUTBOX].restart()  # so that it reports its losses now, not only once a minute
    trouble += _unsettled(world, RECOVERY_SECONDS)
    ended.set()
    world.stop()
    evidence = world.evidence(commands, before, after)
    return replace(evidence, problems=[*trouble, *evidence.problems]), restarts


def _disturb(
    world: World, seed: int, seconds: float, planned: list[Fault]
) -> tuple[Mapping[str, Usage], list[Command], list[str]]:
    """Let changes, commands and faults happen; return what the processes held at first, the commands, and errors."""
    commands = Commands(world.bus, COMMANDS)
    changes = Changes(world.imds, commands, GROUP, LISTENERS, seed)
    faults = Faults(world, planned)
    before: Mapping[str, Usage] = {}
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        threading.Event().wait(min(left, PROGRESS_SECONDS))
        before = before or world.usage()
        active = ", ".join(f"{target}: {kind}" for target, kind in sorted(faults.active.copy().items()))
        print(f"{left:4.0f} s left, {world.figures()}, now failing: {active or 'nothing'}", flush=True)
    changes.stop()
    faults.finish()
    commands.finish()
    return before, commands.sent, faults.problems


def _unsettled(world: World, limit_seconds: float) -> Iterator[str]:
    """Wait until everything works and nothing waits; yield what does not."""
    if not _is_settled(world, limit_seconds):
        names = [name for name, member in world.members.items() if not member.is_settled()]
        yield f"after {limit_seconds:g} s, something waits or does not work; not settled: {names}"


def _is_settled(world: World, limit_seconds: float) -> bool:
    """Wait until everything works and nothing waits, at several looks in a row."""
    looks = deque([False] * LOOKS, LOOKS)

    def look() -> bool:
        looks.append(world.is_settled())
        return all(looks)

    with suppress(AssertionError):
        return wait_until(look, timeout_seconds=limit_seconds, apart_seconds=1.0)
    return False


def _supervise(world: World, ended: threading.Event) -> None:
    while not ended.wait(0.2):
        for member in world.members.values():
            member.supervise()


if __name__ == "__main__":
    sys.exit(main())
