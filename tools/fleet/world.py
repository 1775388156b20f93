"""The fleet: the simulated services, and the real processes on them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import requests
from azure.servicebus import ServiceBusClient

from tests.support.bus import command
from tests.support.console import ConsoleProcess
from tests.support.process import Forward
from tests.support.usage import Usage, usage
from tools.bench.simulators import Remote
from tools.fleet.page import ANSWER_SECONDS, OpenPage
from tools.fleet.plan import FleetVm, Notice, Plan
from tools.fleet.simulators import QUEUE, TOPIC, Bus, Chat, GroupImds

STARTS_AT_A_TIME = 6
STOP_SECONDS = 60.0
RESTARTED_NICE = 19  # with less, a third of the fleet that starts leaves the others no processor
LOOKS_APART_SECONDS = 0.5
SETTLED_LOOKS = 3


class FleetError(Exception):
    """Something did not happen in time."""


class World:
    """Everything that runs. Members are named "VM/role"; relay and console are members, too."""

    def __init__(self, stack: ExitStack, folder: Path, plan: Plan, deadline: float) -> None:
        """Start the services, the relay and the console.

        Args:
            stack: ends everything.
            folder: for configurations, logs and state.
            plan: names the VMs.
            deadline: time.monotonic() at which everything that is still waited for fails.
        """
        self._deadline = deadline
        self.bus = stack.enter_context(Remote(Bus))
        self.chat = stack.enter_context(Remote(Chat))
        groups: dict[str, list[str]] = {}
        for vm in plan.vms:
            groups.setdefault(vm.group, []).append(vm.name)
        self.imds = {
            group: stack.enter_context(Remote(partial(GroupImds, group, names)))
            for group, names in groups.items()
        }
        self._urls: dict[str, str] = {}
        for imds in self.imds.values():
            self._urls |= imds("urls")
        self._connection_string: str = self.bus("address")
        self.exits: list[str] = []  # of processes that nobody killed
        self.console = ConsoleProcess(folder / "console", bus=self._subscription("console"))
        relay = Forward(folder / "relay", self._relay(), role="relay")
        self.members = {
            self._name(vm, role): Forward(folder / self._name(vm, role), settings(vm), role=role)
            for vm in plan.vms
            for role, settings in self._roles(vm)
        }
        self.services = {"relay": relay, "console": self.console}
        self._pages: list[OpenPage] = []
        stack.callback(self._close_pages)  # after the console has ended, and with it their streams
        self._watched = {**self.services, **self.members}  # must not exit unless they are killed
        for process in self._watched.values():
            stack.callback(process.kill)
        relay.start()
        self.console.start()
        # The console names a scale set after its resource group and itself.
        self._pages += [OpenPage(self.console.url, f"{group}/{group}") for group in groups]
        client = stack.enter_context(ServiceBusClient.from_connection_string(self._connection_string))
        self._commands = stack.enter_context(client.get_queue_sender(QUEUE))

    def _roles(
        self, vm: FleetVm
    ) -> Iterator[tuple[Literal["forward", "listen"], Callable[[FleetVm], Mapping[str, Any]]]]:
        yield "forward", self._forward
        if vm.listens:
            yield "listen", self._listen

    @staticmethod
    def _name(vm: FleetVm, role: str) -> str:
        return f"{vm.name}/{role}"

    def _forward(self, vm: FleetVm) -> Mapping[str, Any]:
        return {"imds": {"endpoint": self._urls[vm.name]}, "documents": "named", "sinks": self._sinks()}

    def _listen(self, vm: FleetVm) -> Mapping[str, Any]:
        approvals = {
            "connection_string": self._connection_string,
            "queue": QUEUE,
            "session": "{resource_group}.{vm}",
            "policy": {"allow": [{"event_type": ["Reboot"]}]},
        }
        return {**self._forward(vm), "approvals": approvals}

    def _sinks(self) -> Mapping[str, Any]:
        bus = {"kind": "servicebus", "connection_string": self._connection_string, "topic": TOPIC}
        return {"bus": {**bus, "from_start": True}}

    def _relay(self) -> Mapping[str, Any]:
        hook = {"kind": "webhook", "url": self.chat("address"), "from_start": True}
        return {"relay": self._subscription("chat"), "sinks": {"hook": hook}}

    def _subscription(self, name: str) -> Mapping[str, Any]:
        return {"connection_string": self._connection_string, "topic": TOPIC, "subscription": name}

    def start_all(self, progress: Callable[[str], None]) -> None:
        """Start the members, a few at a time, until each works."""
        waiting, starting = list(self.members), set[str]()
        while waiting or starting:
            while waiting and len(starting) < STARTS_AT_A_TIME:
                starting.add(name := waiting.pop(0))
                self.members[name].start()
            starting = {name for name in starting if not self._is_ready(name)}
            progress(
                f"{len(self.members) - len(waiting) - len(starting)} of {len(self.members)} processes run"
            )
            self._pause(0.1, what=f"the start of {sorted(starting)}")

    def _is_ready(self, name: str) -> bool:
        status = self.members[name].current_status()
        return bool(status and (status.get("last_good_at") or name.endswith("/listen")))

    def schedule(self, notice: Notice) -> float:
        """Let an event appear; return when, in seconds since 1970."""
        at: float = self.imds[notice.vms[0].group](
            "schedule",
            [vm.name for vm in notice.vms],
            event_type=notice.event_type,
            resources=notice.resources,
            notice_seconds=notice.notice_seconds,
            event_id=notice.event_id,
        )
        return at

    def approve(self, notice: Notice) -> str:
        """Send the command that approves an event; return its id."""
        (vm,) = notice.vms
        sent = command(notice.event_id, session=vm.session)
        self._commands.send_messages(sent)
        return str(sent.message_id)

    def kill(self, vm: FleetVm) -> None:
        """End all processes of a VM by SIGKILL."""
        for name in self._members_of(vm):
            self.members[name].kill()

    def restart(self, vm: FleetVm) -> None:
        """Start the processes of a killed VM again, at a low priority: on real VMs they slow down no others."""
        for name in self._members_of(vm):
            process = self.members[name].start().process
            assert process is not None
            os.setpriority(os.PRIO_PROCESS, process.pid, RESTARTED_NICE)

    def _members_of(self, vm: FleetVm) -> list[str]:
        return [self._name(vm, role) for role, _ in self._roles(vm)]

    def settle(self, what: str, is_done: Callable[[], bool] = lambda: True) -> None:
        """Wait until something holds, and nothing waits anywhere.

        Raises:
            FleetError: the time of the whole run is over.
        """
        looks = 0
        while looks < SETTLED_LOOKS:
            looks = looks + 1 if is_done() and not self.bus("waiting") and not self._unsettled() else 0
            self._pause(LOOKS_APART_SECONDS, what=what)

    def _unsettled(self) -> Sequence[str]:
        return [name for name, one in self.members.items() if _waits(one.current_status())]

    def _pause(self, seconds: float, *, what: str) -> None:
        self._note_exits()
        if time.monotonic() > self._deadline:
            raise FleetError(
                f"the time is over while waiting for {what}; not settled: {self._unsettled()[:10]}"
            )
        time.sleep(seconds)

    def _note_exits(self) -> None:
        for name, process in {**self._watched}.items():
            code = process.process.poll() if process.process else None
            if code not in (None, -signal.SIGKILL):
                self.exits.append(f"{name} exited with {code}")
                del self._watched[name]

    def visible(self) -> dict[str, float]:
        """Return when each EventId was on a page for the first time, in seconds since 1970."""
        return {event_id: at for page in self._pages for event_id, at in page.seen.items()}

    def page_seconds(self) -> list[float]:
        """Return how long each fetch of a page took."""
        return [seconds for page in self._pages for seconds in page.fetch_seconds]

    def usage(self) -> Mapping[str, Usage]:
        """Return what each process has used so far; the simulators are named after their service."""
        pids = {
            name: one.process.pid for name, one in {**self.members, **self.services}.items() if one.process
        }
        pids |= {f"IMDS of {group}": imds.pid for group, imds in self.imds.items()}
        pids |= {"bus": self.bus.pid, "chat": self.chat.pid}
        found = {}
        for name, pid in pids.items():
            with suppress(OSError):
                found[name] = usage(pid)
        return found

    def stop_all(self) -> None:
        """Stop the members, then, when what they sent last has arrived, relay and console."""
        self._stop(self.members)
        while self.bus("waiting"):
            self._pause(LOOKS_APART_SECONDS, what="relay and console")
        self._stop(self.services)

    def _close_pages(self) -> None:
        for page in self._pages:
            page.close()

    def _stop(self, processes: Mapping[str, Forward]) -> None:
        for name, process in processes.items():
            self._watched.pop(name, None)
            process.signal()
        end = time.monotonic() + STOP_SECONDS
        for name, process in processes.items():
            assert process.process is not None
            try:
                if code := process.process.wait(max(0.1, end - time.monotonic())):
                    self.exits.append(f"{name} exited with {code} when it was stopped")
            except subprocess.TimeoutExpired:
                self.exits.append(f"{name} has not stopped within {STOP_SECONDS:g} s")

    def on_all(self, method: str) -> None:
        """Call a method of the IMDS of every group."""
        for imds in self.imds.values():
            imds(method)

    def approved(self) -> list[tuple[str, str]]:
        """Return VM and EventId of each approval that an IMDS has accepted."""
        return [one for imds in self.imds.values() for one in imds("approved")]

    def open_events(self) -> list[dict[str, Any]]:
        """Return the events that the console shows as open."""
        return list(self._ask("events")["events"])

    def vms(self) -> list[dict[str, Any]]:
        """Return the VMs as the console shows them."""
        return list(self._ask("vms")["vms"])

    def statuses(self, event_ids: Iterable[str]) -> dict[str, str]:
        """Return the status of each event that the console knows."""
        details = {event_id: self._ask(f"events/{event_id}") for event_id in event_ids}
        return {event_id: one["event"]["status"] for event_id, one in details.items() if "event" in one}

    def _ask(self, path: str) -> dict[str, Any]:
        return dict(requests.get(f"{self.console.url}/api/v1/{path}", timeout=ANSWER_SECONDS).json())


def _waits(status: Mapping[str, Any]) -> bool:
    """Return whether a process has something to send but copies of what others have sent."""
    return not status or any(sink["backlog"] and not sink["is_held"] for sink in status["sinks"].values())
