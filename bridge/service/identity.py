"""Who this VM is, and whose the state is."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Callable
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Literal

from bridge.config.models import Config
from bridge.contract.types import session_id
from bridge.errors import ImdsError, StateError
from bridge.events.builder import Reporter
from bridge.imds.client import INSTANCE_SECONDS, ImdsClient
from bridge.imds.instance import Vm
from bridge.outbox.outbox import Outbox
from bridge.outbox.rows import OWED, STATE, VM
from bridge.runtime.time import Clock, RepeatLimit

log = logging.getLogger(__name__)

# How long a start waits for instance data, if the state may be another VM's.
SETTLE_SECONDS = 5.0
SETTLE_PAUSE_SECONDS = 0.5
RESOLVE_EVERY_SECONDS = 30.0

Role = Literal["forward", "listen", "relay"]


@dataclass(eq=False)
class VmIdentity:
    """The identity in which one process publishes; for the thread that builds the process's events.

    Args:
        config: the whole configuration.
        role: what the process does.
        imds: where instance data comes from; None for a process that does not ask IMDS.
        outbox: what keeps the identity.
        clock: the time.
        boot_id: the machine's, "" if unknown; a clone has started after its state was copied.

    Attributes:
        vm: this VM; None while it is unknown.
        resolved: whether this run has had instance data.
        last_error: why it has none, "" before the first try.
    """

    config: Config
    role: Role
    _: KW_ONLY
    imds: ImdsClient | None
    outbox: Outbox
    clock: Clock
    boot_id: str = ""
    vm: Vm | None = field(default=None, init=False)
    resolved: bool = field(default=False, init=False)
    last_error: str = field(default="", init=False)
    _resolve_at: float = field(default=-math.inf, init=False)
    _name: str = field(default="", init=False)
    _own_source: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._log_limit = RepeatLimit(self.clock)

    def settle(self, wait: Callable[[float], object]) -> None:
        """Find out whose the state is, before anything is committed or delivered; another VM's is moved aside.

        The same boot is proof enough. Where instance data fails for 5 s, the state counts as this VM's.

        Args:
            wait: waits for so many seconds; what it returns ends the search if it is true.
        """
        kept = self.outbox.record(STATE, VM)
        self.vm = Vm(**kept["vm"]) if kept else None
        last_try_at = self.clock.monotonic() + SETTLE_SECONDS - INSTANCE_SECONDS
        if self.imds and not (kept and kept["boot_id"] and kept["boot_id"] == self.boot_id):
            while not self._ask() and self.clock.monotonic() < last_try_at and not wait(SETTLE_PAUSE_SECONDS):
                pass
        self._name = self.vm.name if self.vm else socket.gethostname()
        self._own_source = self.reporter().own_source  # within a run, both stay the same

    def resolve(self) -> None:
        """Request instance data now and then until there is some.

        Raises:
            StateError: the state is another VM's after all; the next start moves it aside.
        """
        now = self.clock.monotonic()
        if self.imds and not self.resolved and now >= self._resolve_at:
            self._resolve_at = now + RESOLVE_EVERY_SECONDS
            self._ask(is_running=True)

    def _ask(self, *, is_running: bool = False) -> bool:
        """Request instance data once, and compare it with what is kept; return whether there is some."""
        assert self.imds is not None  # noqa: S101 - the callers have checked it
        try:
            vm = self.imds.instance()
        except ImdsError as error:
            self.last_error = str(error)
            if self._log_limit.is_due(str(error)):
                log.warning("the VM's identity is not available yet: %s", error)
            return False
        was = self.vm.vm_id if self.vm else ""
        if was and vm.vm_id and was.lower() != vm.vm_id.lower():
            if is_running:
                raise StateError(
                    f"the state is that of VM {was}, and this is {vm.vm_id}: the process ends, and the next start "
                    "moves it aside"
                )
            owed = self.outbox.record(STATE, OWED) or []  # the disk is a copy of one that was out of work
            target = self.outbox.replace()
            if owed:
                self.outbox.commit(
                    [], records={(STATE, OWED): [{**one, "is_other_vms": True} for one in owed]}
                )
            log.error(
                "the state is another VM's (a clone or an image?): moved aside; starting with an empty outbox",
                extra={"kept_as": str(target), "was": was, "is": vm.vm_id},
            )
        self.vm, self.resolved, self.last_error = vm, True, ""
        self.outbox.commit([], records={(STATE, VM): {"boot_id": self.boot_id, "vm": asdict(vm)}})
        return True

    def reporter(self) -> Reporter:
        """Return what builds events in this VM's name, as far as it is known, as of now."""
        return Reporter(
            name=self._name,
            role=self.role,
            epoch=self.outbox.epoch,
            at=self.clock.now(),
            next_number=self.outbox.next_number,
            vm=self.vm,
            group_source=self.config.source,
            vm_source=self._own_source or self.config.vm_source,
            session=self.config.approvals.session if self.config.approvals else "",
        )


def approval_session(template: str, vm: Vm | None) -> str | None:
    """Return a VM's session id; "" without a template, None while the VM is unknown."""
    if not template:
        return ""
    if vm is None:
        return None
    return session_id(template, vm=vm.name, resource_group=vm.resource_group)
