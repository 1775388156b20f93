"""Run a fleet of real processes through a storm of events on the simulators; report losses, delays and costs."""

from __future__ import annotations

import argparse
import json
import sched
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bridge.sinks.servicebus import REST_SECONDS
from tools.fleet.plan import Notice, Plan, plan
from tools.fleet.report import Evidence, Window, problems, summary
from tools.fleet.world import FleetError, World

LIMIT_SECONDS = 570.0  # of the whole run
CALM_SECONDS = 30.0
RESTART_SECONDS = 5.0  # after a kill, as the systemd unit does
COMMAND_SECONDS = 1.0  # after the event that it approves
PROGRESS_SECONDS = 5.0
SHOWN_PROBLEMS = 20


def main() -> int:
    """Return 0 if nothing was lost, doubled or wrong."""
    options = _options()
    planned = plan(options.vms, options.listeners, options.seed)
    folder = Path(tempfile.mkdtemp(prefix="imds-bridge-fleet-"))
    print(f"fleet: {options.vms} VMs, seed {options.seed}; at most {LIMIT_SECONDS:.0f} s", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("fleet: stopped"))
    try:
        with ExitStack() as stack:
            evidence = Run(
                World(stack, folder, planned, time.monotonic() + LIMIT_SECONDS), planned
            ).evidence()
    except FleetError as error:
        print(f"fleet: FAILED: {error}; logs are in {folder}")
        return 1
    for line in summary(evidence):
        print(line)
    found = problems(evidence)
    for problem in found[:SHOWN_PROBLEMS]:
        print(f"PROBLEM: {problem}")
    if found:
        print(f"fleet: FAILED with {len(found)} problems; logs are in {folder}")
        return 1
    if not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    print("fleet: nothing lost, nothing doubled")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.fleet", description=__doc__)
    parser.add_argument("--vms", type=_count, default=200, help="how many VMs (default: %(default)s)")
    parser.add_argument(
        "--listeners",
        type=_count,
        default=20,
        help="how many of them listen for commands (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=1, help="chooses events and kills (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep logs and states also of a good run")
    return parser.parse_args()


def _count(text: str) -> int:
    if not 1 <= (count := int(text)) <= 400:  # 400 need 24 GiB
        raise argparse.ArgumentTypeError(f"given {text}, expected 1 to 400")
    return count


class Run:
    """The parts of a run, one after the other."""

    def __init__(self, world: World, planned: Plan) -> None:
        self._world = world
        self._plan = planned
        self._event_ids = {notice.event_id for notice in planned.notices}
        self._appeared: dict[str, float] = {}
        self._commands: dict[str, str] = {}
        self._seconds: dict[str, float] = {}
        self._printed_at = 0.0

    def evidence(self) -> Evidence:
        """Run everything; return what is to be judged.

        Raises:
            FleetError: something did not happen in time.
        """
        world = self._world
        with self._part("start"):
            world.start_all(self._progress)
            world.settle("the first events")
        with self._part("calm"):
            time.sleep(2 * REST_SECONDS)  # until the senders have closed
            world.bus("load")
            calm = self._measured(lambda: time.sleep(CALM_SECONDS))
            at_rest = world.bus("load")
        with self._part("storm"):
            storm = self._measured(self._storm)
            in_storm = world.bus("load")
        with self._part("approvals"):
            world.settle("the approvals", lambda: len(world.approved()) >= len(self._commands))
        with self._part("ends"):
            world.on_all("start_all")
            world.settle("the starts", lambda: self._open_statuses() == {"Started"})
            world.on_all("complete_all")
            world.settle("the ends", lambda: not self._open_statuses())
            console, console_vms = world.statuses(self._event_ids), world.vms()
            connections = world.bus("figures")["connections"]
        with self._part("stop"):
            world.stop_all()
        return Evidence(
            plan=self._plan,
            appeared=self._appeared,
            stored=[json.loads(body) for body in world.bus("stored")],
            stored_at=world.bus("stored_at"),
            relayed=world.chat("events"),
            visible=world.visible(),
            console=console,
            console_vms=console_vms,
            commands=self._commands,
            approved=world.approved(),
            bus={**world.bus("figures"), "connections": connections},
            calm=calm,
            storm=storm,
            loads={"at rest": at_rest, "storm": in_storm},
            exits=world.exits,
            seconds=self._seconds,
            page_seconds=world.page_seconds(),
        )

    def _storm(self) -> None:
        """Let events appear and VMs die, each at its instant, or later on a slow machine; wait for the notices."""
        world, timetable = self._world, sched.scheduler(time.monotonic, time.sleep)
        for notice in self._plan.notices:
            timetable.enter(notice.at, 0, self._schedule, (notice,))
            if notice.is_approved:
                timetable.enter(notice.at + COMMAND_SECONDS, 0, self._approve, (notice,))
        for at, vm in self._plan.kills:
            timetable.enter(at, 0, world.kill, (vm,))
            timetable.enter(at + RESTART_SECONDS, 0, world.restart, (vm,))
        timetable.run()
        world.settle("all notices on the page", lambda: self._event_ids <= world.visible().keys())

    def _schedule(self, notice: Notice) -> None:
        self._appeared[notice.event_id] = self._world.schedule(notice)

    def _approve(self, notice: Notice) -> None:
        self._commands[self._world.approve(notice)] = notice.event_id

    def _open_statuses(self) -> set[str]:
        return {event["status"] for event in self._world.open_events()}

    def _measured(self, act: Callable[[], None]) -> Window:
        began, before = time.monotonic(), self._world.usage()
        act()
        return Window(seconds=time.monotonic() - began, before=before, after=self._world.usage())

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        print(f"{name} ...", flush=True)
        began = time.monotonic()
        yield
        self._seconds[name] = time.monotonic() - began

    def _progress(self, text: str) -> None:
        if time.monotonic() - self._printed_at >= PROGRESS_SECONDS:
            self._printed_at = time.monotonic()
            print(f"  {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
