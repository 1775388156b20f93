"""Carry out the plan: each fault begins, lasts, and ends, on the real part or its simulator."""

from __future__ import annotations

import resource
import signal
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress

from tests.support.inbox import Inbox
from tests.support.process import wait_until
from tests.support.usage import memory_mib
from tools.soak.member import Member
from tools.soak.plan import Fault
from tools.soak.truth import Span
from tools.soak.world import TOPIC, World

CLOCK_SECONDS = 7_200
STORE_SECONDS = 30.0
MORE_MIB = 1.0
SPOILT_ANSWERS = ("garbage", "empty", "huge")
CLIENTS_AGAIN = ("silent", "refuse_cbs")  # what fails new connections only

_Member = Callable[[Member, Fault], AbstractContextManager[None]]


class Faults:
    """Apply a plan, one thread for each target, until the last fault has ended."""

    def __init__(self, world: World, plan: Sequence[Fault]) -> None:
        self.active: dict[str, str] = {}
        self.problems: list[str] = []
        self._world = world
        self._began_at = time.monotonic()
        self._stop = threading.Event()
        lanes: dict[str, list[Fault]] = defaultdict(list)
        for fault in plan:
            lanes[fault.target].append(fault)
        self._threads = [
            threading.Thread(target=self._run, args=[lane], daemon=True) for lane in lanes.values()
        ]
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Begin no further fault, and end those that last."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, lane: Sequence[Fault]) -> None:
        for fault in lane:
            if self._wait_until(fault.start):
                return
            try:
                self._apply(fault)
            except Exception:  # noqa: BLE001 - the soak goes on, and fails at the end
                self.problems.append(f"{fault} could not be applied: {traceback.format_exc()}")

    def _apply(self, fault: Fault) -> None:
        start = time.monotonic()
        with fault_of(self._world, fault):
            self.active[fault.target] = fault.kind
            self._wait_until(fault.end)
        del self.active[fault.target]
        self._world.faults.append((fault.target, Span(start=start, end=time.monotonic(), kind=fault.kind)))

    def _wait_until(self, seconds: float) -> bool:
        return self._stop.wait(max(0.0, self._began_at + seconds - time.monotonic()))


def fault_of(world: World, fault: Fault) -> AbstractContextManager[None]:
    """Return what applies a fault when it is entered, and ends it when it is left."""
    if fault.target == "imds":
        return _imds(world, fault)
    if fault.target == "bus":
        return _bus(world, fault)
    what, _, name = fault.target.rpartition(" of ")
    if what:
        return _receiver((world.hooks if what == "hook" else world.grids)[name], fault)
    return MEMBER_FAULTS[fault.kind](world.members[name], fault)


@contextmanager
def _imds(world: World, fault: Fault) -> Iterator[None]:
    """Let IMDS fail for all VMs; also for approvals, but what is answered with 200 is one."""
    seconds = 1 + 6 * fault.size if fault.kind == "slow" else None
    method = "GET" if fault.kind in SPOILT_ANSWERS else None
    world.imds.fault(fault.kind, count=None, seconds=seconds, method=method)
    yield
    world.imds.clear_faults()


@contextmanager
def _bus(world: World, fault: Fault) -> Iterator[None]:
    if fault.kind == "outage":
        world.bus.stop_listening()
        yield
        world.bus.listen_again()
        return
    world.bus.fault(fault.kind, TOPIC if fault.kind == "disabled" else None)
    if fault.kind in CLIENTS_AGAIN:
        world.bus.fault("drop")
    yield
    world.bus.clear_faults()


@contextmanager
def _receiver(lab: Inbox, fault: Fault) -> Iterator[None]:
    seconds = 1 + 6 * fault.size if fault.kind == "slow" else None
    lab.fault(fault.kind, count=None, seconds=seconds, retry_after=2 if fault.kind == "429" else None)
    yield
    lab.clear_faults()


@contextmanager
def _kill(member: Member, _: Fault) -> Iterator[None]:
    # A process that is killed while it has no disk may lose what it has in memory.
    with suppress(AssertionError):
        wait_until(lambda: not member.process.status().get("storage_error"), timeout_seconds=STORE_SECONDS)
    member.kill()
    yield
    member.start()


@contextmanager
def _suspend(member: Member, _: Fault) -> Iterator[None]:
    member.process.signal(signal.SIGSTOP)
    yield
    member.process.signal(signal.SIGCONT)


@contextmanager
def _memory(member: Member, fault: Fault) -> Iterator[None]:
    """Let the process allocate almost nothing more; it may exit, and is started again without that limit."""
    member.may_exit = True
    held = memory_mib("VmData", member.pid) + fault.size * MORE_MIB
    member.limit(resource.RLIMIT_DATA, int(held * 2**20))
    yield
    member.limit(resource.RLIMIT_DATA, None)


@contextmanager
def _clock(member: Member, fault: Fault) -> Iterator[None]:
    member.set_clock(int((fault.size - 0.5) * 2 * CLOCK_SECONDS))
    yield
    member.set_clock(0)


@contextmanager
def _disk(member: Member, _: Fault) -> Iterator[None]:
    """Fill the disk; where none could be mounted, let every write fail."""
    if member.disk:
        member.disk.fill()
        yield
        member.disk.free()
        return
    member.limit(resource.RLIMIT_FSIZE, 0)
    yield
    member.limit(resource.RLIMIT_FSIZE, None)


MEMBER_FAULTS: Mapping[str, _Member] = {
    "kill": _kill,
    "stop": _suspend,
    "memory": _memory,
    "clock": _clock,
    "disk": _disk,
}
