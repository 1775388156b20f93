"""The simulators, and the real processes on them."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, Self

from bridge.lab.httpd import KEPT_REQUESTS
from bridge.lab.imds import EVENTS_PATH
from tests.support.disk import SmallDisk
from tests.support.eventgrid import EventGridLab
from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox
from tests.support.process import Forward, wait_until
from tests.support.servicebus import ServiceBusLab, fleet_entities
from tests.support.usage import Usage
from tools.soak.checks import APPROVABLE_TYPES, DENIED_SOURCE
from tools.soak.member import Member
from tools.soak.plan import BUS_KINDS, HTTP_KINDS, IMDS_KINDS, Lane
from tools.soak.truth import Command, Evidence, History, Observer, Poll, Span

Role = Literal["forward", "listen", "relay"]
ROLES: tuple[Role, ...] = ("forward", "listen", "relay")

GROUP = tuple(f"web-{number}" for number in range(100))  # as many VMs as a placement group has
FORWARDERS, LISTENERS = GROUP[:4], GROUP[4:6]
SMALL_OUTBOX = f"{FORWARDERS[3]}/forward"  # its webhook fails for long, so it must drop events
ON_SMALL_DISKS = (f"{FORWARDERS[2]}/forward", f"{LISTENERS[1]}/listen")
RELAY = "relay"
TOPIC, COMMANDS = "scheduled-events", "approvals"
DISK_MEBIBYTES = 64
SETTLE_SECONDS = 60.0

# The first forwarder and the first listener run from start to end, so that anything that they leak shows.
PROCESS_LANES = {
    f"{FORWARDERS[0]}/forward": Lane(kinds=("stop", "clock"), fail_seconds=(1, 12)),
    f"{FORWARDERS[1]}/forward": Lane(kinds=("kill", "memory", "stop"), fail_seconds=(0, 8)),
    f"{FORWARDERS[2]}/forward": Lane(kinds=("disk", "kill", "clock", "disk"), fail_seconds=(1, 12)),
    f"{FORWARDERS[3]}/forward": Lane(kinds=("kill", "memory", "clock"), fail_seconds=(0, 8)),
    f"{LISTENERS[0]}/listen": Lane(kinds=("stop", "clock"), fail_seconds=(1, 12)),
    f"{LISTENERS[1]}/listen": Lane(kinds=("kill", "memory", "disk"), fail_seconds=(1, 8)),
    RELAY: Lane(kinds=("kill", "stop", "memory"), fail_seconds=(0, 8)),
}
HTTP_LANE = Lane(kinds=HTTP_KINDS, fail_seconds=(1, 20), rest_seconds=(5, 30))
LANES: Mapping[str, Lane] = {
    **PROCESS_LANES,
    "imds": Lane(kinds=IMDS_KINDS),
    "bus": Lane(kinds=BUS_KINDS),
    **{f"hook of {name}": HTTP_LANE for name in PROCESS_LANES},
    **{f"grid of {vm}/forward": HTTP_LANE for vm in FORWARDERS},
    f"hook of {SMALL_OUTBOX}": Lane(kinds=("503",), fail_seconds=(35, 50), rest_seconds=(10, 40)),
}


class World:
    """Everything that runs. `members` are the processes by name, `hooks` and `grids` their receivers."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.history = History()
        self.imds = stack.enter_context(
            ImdsLab(vms=(*FORWARDERS, *LISTENERS), report=lambda _: self._record())
        )
        self._record()
        self.bus = stack.enter_context(ServiceBusLab(fleet_entities(TOPIC, ("all", "chat"), COMMANDS)))
        self.hooks = {name: stack.enter_context(Inbox(strict=True)) for name in PROCESS_LANES}
        self.grids = {f"{vm}/forward": stack.enter_context(EventGridLab()) for vm in FORWARDERS}
        self.faults: list[tuple[str, Span]] = []  # what was done, by target
        self._library = _build_clock(folder)
        self.members = {name: self._member(stack, folder, name) for name in PROCESS_LANES}

    def _record(self) -> None:
        # Called with the simulator's lock held, so that the two belong together.
        self.history.record(self.imds.incarnation, self.imds.events, time.monotonic())

    def _member(self, stack: ExitStack, folder: Path, name: str) -> Member:
        place = folder / name.replace("/", "-")
        place.mkdir()
        disk = stack.enter_context(_mounted(place / "disk")) if name in ON_SMALL_DISKS else None
        clock = place / "clock"
        role: Role = next(role for role in ROLES if name.endswith(role))
        settings = {"state_dir": disk.state if disk else place / "state", **self._settings(name, role)}
        environment = {"LD_PRELOAD": str(self._library), "SOAK_CLOCK": str(clock)}
        process = Forward(place, settings, role=role, env=environment)
        process.state = settings["state_dir"] / role
        stack.callback(process.kill)
        return Member(process, name, clock, disk)

    def _settings(self, name: str, role: Role) -> dict[str, Any]:
        of_role = {"forward": self._forward, "listen": self._listen, "relay": self._relay}[role]
        most = 16 if name == SMALL_OUTBOX else DISK_MEBIBYTES / 2
        return {"stop_seconds": SETTLE_SECONDS / 2, "max_outbox_mb": most, **of_role(name)}

    def _forward(self, name: str) -> dict[str, Any]:
        grid = self.grids[name]
        endpoint = {"endpoint": grid.custom_endpoint, "key": grid.keys[0], "from_start": True}
        sinks = {**self._sinks(name), "grid": {"kind": "eventgrid", **endpoint}}
        return {"imds": self._endpoint(name), "sinks": sinks}

    def _listen(self, name: str) -> dict[str, Any]:
        approvals = {
            "connection_string": self.bus.connection_string,
            "queue": COMMANDS,
            "session": "{resource_group}.{vm}",
            "grace_seconds": 5,
            "policy": {
                "allow": [{"event_type": [*APPROVABLE_TYPES]}],
                "deny": [{"event_source": [DENIED_SOURCE]}],
            },
        }
        return {"imds": self._endpoint(name), "sinks": self._sinks(name), "approvals": approvals}

    def _relay(self, name: str) -> dict[str, Any]:
        source = {"topic": TOPIC, "subscription": "chat", "connection_string": self.bus.connection_string}
        return {"sinks": {"hook": self._hook(name)}, "relay": source}

    def _sinks(self, name: str) -> dict[str, Any]:
        bus = {"kind": "servicebus", "connection_string": self.bus.connection_string, "topic": TOPIC}
        return {"hook": self._hook(name), "bus": {**bus, "from_start": True}}

    def _hook(self, name: str) -> dict[str, Any]:
        return {"kind": "webhook", "url": self.hooks[name].url, "from_start": True}

    def _endpoint(self, name: str) -> dict[str, Any]:
        return {"endpoint": self.imds.url(name.partition("/")[0]), "poll_seconds": 0.5}

    def __enter__(self) -> Self:
        for member in self.members.values():
            member.start()
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members.values():
            member.kill()

    def is_settled(self) -> bool:
        """Return whether every process works, and nothing waits anywhere."""
        waiting = (COMMANDS, f"{TOPIC}/Subscriptions/chat")
        return all(member.is_settled() for member in self.members.values()) and not any(
            self.bus.entity(path).counts.active for path in waiting
        )

    def usage(self) -> dict[str, Usage]:
        """Return what each process that runs holds now."""
        found = {}
        for name, member in self.members.items():
            with suppress(OSError):  # it has just exited
                found[name] = member.usage()
        return found

    def stop(self) -> None:
        """Stop all processes in order, and wait until the relay has delivered what they sent last."""
        *publishers, relay = self.members.values()
        threads = [threading.Thread(target=member.stop) for member in publishers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with suppress(AssertionError):
            wait_until(self._is_relayed, timeout_seconds=SETTLE_SECONDS, apart_seconds=0.5)
        relay.stop()

    def _is_relayed(self) -> bool:
        is_empty = not self.bus.entity(f"{TOPIC}/Subscriptions/chat").counts.active
        return is_empty and self.members[RELAY].is_settled()

    def evidence(
        self, commands: list[Command], before: Mapping[str, Usage], after: Mapping[str, Usage]
    ) -> Evidence:
        """Return what the checks look at, when all has stopped."""
        topic = [json.loads(one.body) for one in self.bus.entity(f"{TOPIC}/Subscriptions/all").messages]
        dead = self.bus.entity(COMMANDS).dead_letters
        return Evidence(
            documents=self.history.documents,
            observers=[self._observer(name) for name in self.grids],
            topic=topic,
            relayed=self.hooks[RELAY].events(),
            receipts={vm: self.hooks[f"{vm}/listen"].events() for vm in LISTENERS},
            commands=commands,
            approvals=[(one.vm, one.event_id) for one in self.imds.approvals],
            dead_letters=frozenset(one.message_id for one in dead),
            before=before,
            after=after,
            problems=[*self._problems()],
        )

    def _problems(self) -> Iterator[str]:
        for member in self.members.values():
            yield from member.problems
        for name, lab in [*self.hooks.items(), *self.grids.items()]:
            yield from (f"{name} sent what is not valid: {text}" for text in lab.problems)
            if len(lab.received) == KEPT_REQUESTS:
                yield f"a receiver of {name} got more than it keeps, so that nothing can be said"
        if len(self.imds.requests()) == KEPT_REQUESTS:
            yield "IMDS got more requests than it keeps, so that nothing can be said"
        yield from (f"the simulated bus failed: {error}" for error in self.bus.failures)

    def _observer(self, name: str) -> Observer:
        vm = name.partition("/")[0]
        spoiled = [span for target, span in self.faults if target == "imds"]
        polls = [
            Poll(
                at=one.at,
                wall=one.wall,
                is_clean=one.status == 200 and not any(span.overlaps(one.at, one.at) for span in spoiled),
            )
            for one in self.imds.requests(vm)
            if one.path == EVENTS_PATH
        ]
        return Observer(
            name=name,
            sinks={"hook": self.hooks[name].events(), "grid": self.grids[name].events()},
            polls=polls,
            runs=self.members[name].runs(),
            unclear=[span for target, span in self.faults if _is_unclear(target, span, name)],
        )

    def figures(self) -> dict[str, Any]:
        """Return what is worth printing: how much has happened so far."""
        delivered = Counter(
            {
                "webhooks": sum(len(lab.events()) for lab in self.hooks.values()),
                "Event Grid": sum(len(lab.events()) for lab in self.grids.values()),
                "bus": self.bus.entity(TOPIC).counts.enqueued,
            }
        )
        return {"changes": len(self.history.documents) - 1, **delivered}


def _is_unclear(target: str, span: Span, name: str) -> bool:
    """Return whether it cannot be said what a process took for a gap: its clock was wrong, or answers were late."""
    return (target == name and span.kind == "clock") or (target == "imds" and span.kind == "slow")


def _build_clock(folder: Path) -> Path:
    library = folder / "clock.so"
    source = Path(__file__).with_name("clock.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", library, source], check=True)  # noqa: S607
    return library


@contextmanager
def _mounted(path: Path) -> Iterator[SmallDisk | None]:
    """Mount a small disk, where that is allowed."""
    disk = SmallDisk(path, mebibytes=DISK_MEBIBYTES)
    try:
        disk.mount()
    except (OSError, subprocess.CalledProcessError):
        yield None
        return
    try:
        yield disk
    finally:
        disk.unmount()
