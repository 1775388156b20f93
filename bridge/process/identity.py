"""Who this VM is, and whose the state is."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Callable
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Literal

from bridge.errors import ImdsError, StateError
from bridge.events.builder import Reporter
from bridge.imds.client import INSTANCE_SECONDS, ImdsClient
from bridge.imds.instance import Vm
from bridge.outbox.rows import AGAIN, OWED, STATE, VM
from bridge.outbox.upkeep import KeptOutbox
from bridge.runtime.time import Clock, RepeatLimit

log = logging.getLogger(__name__)

# How long a start waits for instance data, if the state may be another VM's.
SETTLE_SECONDS = 5.0
SETTLE_PAUSE_SECONDS = 0.5
# How often instance data is read while some of it is missing, and once it is complete.
RESOLVE_EVERY_SECONDS = 60.0
READ_EVERY_SECONDS = 600.0
# How often it is read while events of the document wait for it.
AT_ONCE_PAUSE_SECONDS = 0.9
# How long `listen` waits for it while it runs: a program starts within 1.5 s of its event.
BESIDE_SECONDS = 1.0

Role = Literal["forward", "listen", "relay"]


@dataclass(eq=False)
class VmIdentity:
    """The identity in which one process publishes; for the thread that builds the process's events.

    Args:
        role: what the process does.
        imds: where instance data comes from; None for a process that does not ask IMDS.
        outbox: what keeps the identity.
        clock: the time.
        boot_id: the machine's, "" if unknown; a clone has started after its state was copied.
        make_reporter: makes what builds events, with what the configuration says of their names.
        has_instance_data: False if the configuration names the VM instead.

    Attributes:
        vm: in whose name this run publishes; None while that is unknown.
        is_renamed: whether instance data names the VM otherwise by now: this process ends, and the next start has it.
        resolved: whether `vm` is proven: by instance data in this process or, until that differs, in this boot.
        last_error: why something of what every VM has is not known; "" before the first try.
    """

    role: Role
    _: KW_ONLY
    imds: ImdsClient | None
    outbox: KeptOutbox
    clock: Clock
    boot_id: str = ""
    make_reporter: Callable[..., Reporter] = Reporter
    has_instance_data: bool = True
    vm: Vm | None = field(default=None, init=False)
    is_renamed: bool = field(default=False, init=False)
    resolved: bool = field(default=False, init=False)
    last_error: str = field(default="", init=False)
    _is_known: bool = field(default=False, init=False)  # instance data has told all of it in this process
    _asked_at: float = field(default=-math.inf, init=False)
    _pause_seconds: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._log_limit = RepeatLimit(self.clock)
        self._host = socket.gethostname()  # it may change at a boot

    def settle(self, wait: Callable[[float], object]) -> None:
        """Find out whose the state is, before anything is committed or delivered; another VM's is moved aside.

        The same boot is proof enough, until instance data contradicts it. Where that fails for 5 s, the state counts
        as this VM's: enough to publish in its name and to prepare it, not to approve.

        Args:
            wait: waits for so many seconds; what it returns ends the search if it is true.
        """
        kept = self.outbox.record(STATE, VM)
        self.vm = Vm(**kept["vm"]) if kept else None
        last_try_at = self.clock.monotonic() + SETTLE_SECONDS - INSTANCE_SECONDS
        is_same_boot = self.resolved = bool(kept and kept["boot_id"] and kept["boot_id"] == self.boot_id)
        self._asked_at = self.clock.monotonic()
        if self.imds and not is_same_boot:
            while not self._ask() and self.clock.monotonic() < last_try_at and not wait(SETTLE_PAUSE_SECONDS):
                pass
        self._pause_seconds = READ_EVERY_SECONDS if self._is_known else float(is_same_boot)

    def resolve(self, *, at_once: bool = False) -> None:
        """Request instance data: soon, and then every minute, while some is missing, else every ten minutes.

        Args:
            at_once: events of the document wait for it.

        Raises:
            StateError: the state is another VM's after all; the next start moves it aside.
        """
        pause_seconds = min(AT_ONCE_PAUSE_SECONDS, self._pause_seconds) if at_once else self._pause_seconds
        is_due = self.clock.monotonic() - self._asked_at >= pause_seconds
        if self.imds and is_due and not self.is_renamed:
            limit_seconds = BESIDE_SECONDS if self.role == "listen" else INSTANCE_SECONDS
            self._ask(is_running=True, limit_seconds=limit_seconds)
            again = 1.0 if at_once else min(RESOLVE_EVERY_SECONDS, max(1.0, 2 * self._pause_seconds))
            self._pause_seconds = READ_EVERY_SECONDS if self._is_known else again

    def _ask(self, *, is_running: bool = False, limit_seconds: float = INSTANCE_SECONDS) -> bool:
        """Request instance data once, and compare it with what is known; return whether it is as complete."""
        assert self.imds is not None  # noqa: S101 - the callers have checked it
        self._asked_at = self.clock.monotonic()
        try:
            vm = self.imds.instance(limit_seconds)
        except ImdsError as error:
            self._note(str(error))
            return False
        was = self.vm.vm_id if self.vm else ""
        if self.vm and was and vm.vm_id and was.lower() != vm.vm_id.lower():
            if is_running:  # or the next start would take the same boot for a proof
                self.outbox.commit([], records={(STATE, VM): {"boot_id": "", "vm": asdict(self.vm)}})
                raise StateError(
                    f"the state is that of VM {was}, and this is {vm.vm_id}: the process ends, and the next start "
                    "moves it aside"
                )
            # The disk is a copy of one that was out of work. What was run in this boot was run here, in another name
            # such as a simulator's.
            owed = self.outbox.record(STATE, OWED) or []
            others = [{**one, "is_other_vms": not one["boot"] or one["boot"] != self.boot_id} for one in owed]
            target = self.outbox.replace({OWED: others} if others else {})
            log.error(
                "the state is another VM's (a clone or an image?): moved aside; starting with an empty outbox",
                extra={"kept_as": str(target), "was": was, "is": vm.vm_id},
            )
            self.vm = None
        known, missing = self.vm, vm.missing if self.has_instance_data else []
        self._note(f"instance data lacks {', '.join(missing)}" if missing else "")
        self._is_known |= not missing
        if known and len(missing) > len(known.missing):
            self.resolved |= vm.name.lower() == known.name.lower()
            return False
        same = vm.named_as(known) if known else None
        if is_running and not same:
            self.is_renamed = True
            self._keep(vm, again=not known)  # what was published without a name
            text = "instance data names this VM %s: the process ends, and the next start publishes as that"
            log.warning(text, vm.name)
            return True
        self.vm, self.resolved = same or vm, True
        self._keep(self.vm)
        return True

    def _note(self, error: str) -> None:
        """Note why instance data is missing; once it is known, a reading that fails takes nothing away."""
        if not self._is_known:
            self.last_error = error
        if error and self._log_limit.is_due(error):
            log.warning("the VM's identity is not available yet: %s", error)

    def _keep(self, vm: Vm, *, again: bool = False) -> None:
        """Keep who the VM is; with `again`, the next start publishes the whole document again."""
        kept = {"boot_id": self.boot_id, "vm": asdict(vm)}
        if kept != self.outbox.record(STATE, VM):
            more = {(STATE, AGAIN): True} if again else {}
            self.outbox.commit([], records={(STATE, VM): kept, **more})

    def reporter(self) -> Reporter:
        """Return what builds events in this VM's name, as far as it is known, as of now."""
        return self.make_reporter(
            name=self.vm.name if self.vm else self._host,
            role=self.role,
            epoch=self.outbox.epoch,
            at=self.clock.now(),
            next_number=self.outbox.next_number,
            vm=self.vm,
        )
