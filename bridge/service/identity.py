"""Who this VM is, and the events that a process publishes about itself."""

from __future__ import annotations

import json
import logging
import math
import socket
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Literal
from uuid import uuid4

from bridge import __version__
from bridge.config.models import Config
from bridge.errors import ImdsError
from bridge.events.builder import Reporter
from bridge.events.model import CloudEvent
from bridge.formats.cloudevents import encode_events
from bridge.imds.instance import Vm
from bridge.imds.port import Imds
from bridge.outbox.outbox import DAMAGE, Loss, Outbox
from bridge.runtime.clock import Clock

log = logging.getLogger(__name__)

RESOLVE_EVERY_SECONDS = 30.0
RESOLVE_AGAIN_SECONDS = 1.0  # after the first failure; doubled after each further one
HEARTBEAT_EVERY_SECONDS = 3600.0
LOSSES_EVERY_SECONDS = 60.0
# How long events of earlier processes wait for the identity: a clone should not deliver them, but IMDS may be
# unavailable for long.
HOLD_SECONDS = 20.0

Role = Literal["forward", "listen", "relay"]


class VmIdentity:
    """The identity and the heartbeat of one process; for the thread that builds the process's events.

    Args:
        config: the whole configuration.
        role: what the process does.
        imds: where instance data comes from; None for a process that does not ask IMDS.
        outbox: what keeps the identity and gets the events.
        clock: the time.
        boot_id: the machine's, "" if unknown; a clone has started after its state was copied.
    """

    def __init__(
        self,
        config: Config,
        role: Role,
        *,
        imds: Imds | None,
        outbox: Outbox,
        clock: Clock,
        boot_id: str = "",
    ) -> None:
        self._config = config
        self._role = role
        self._imds = imds
        self._outbox = outbox
        self._clock = clock
        self._boot_id = boot_id
        self._is_same_boot = bool(boot_id) and boot_id == outbox.meta("boot_id")
        self.resolved = False
        self._resolve_wait_seconds = RESOLVE_AGAIN_SECONDS
        self._resolve_at = -math.inf
        self._heartbeat_at = -math.inf
        self._losses_at = -math.inf
        self.vm = self._kept_vm()
        self._reporter: Reporter | None = None
        self._unconfirmed_epoch = uuid4().hex
        self._unconfirmed_count = 0
        if not self.is_confirmed:
            outbox.hold_kept(HOLD_SECONDS)

    @property
    def is_confirmed(self) -> bool:
        """Whether the state is known to be this VM's; until then nothing is published in its name."""
        return self.resolved or self._is_same_boot or not self._outbox.meta("vm_id")

    def _kept_vm(self) -> Vm | None:
        """Return the VM as an earlier process of this boot knew it, for as long as instance data is not available."""
        if not self._is_same_boot:
            return None
        try:
            return Vm(**json.loads(self._outbox.meta("vm")))
        except (ValueError, TypeError):
            return None

    def resolve(self) -> bool:
        """Request instance data until there is some; return whether the state was another VM's and is moved aside."""
        now = self._clock.monotonic()
        if self._imds is None or self.resolved or now < self._resolve_at:
            return False
        self._resolve_at = now + self._resolve_wait_seconds
        self._resolve_wait_seconds = min(RESOLVE_EVERY_SECONDS, 2 * self._resolve_wait_seconds)
        try:
            vm = self._imds.instance()
        except ImdsError as error:
            log.warning("the VM's identity is not available yet: %s", error)
            return False
        self.resolved = True
        kept = self._outbox.meta("vm_id")
        is_other = bool(kept and vm.vm_id) and kept.lower() != vm.vm_id.lower()
        if is_other:
            target = self._outbox.move_aside()
            log.error(
                "the state is another VM's (a clone or an image?): moved aside; starting with an empty outbox",
                extra={"kept_as": str(target), "was": kept, "is": vm.vm_id},
            )
        self.vm = vm
        self._outbox.set_meta(
            {"vm_id": vm.vm_id or kept, "boot_id": self._boot_id, "vm": json.dumps(asdict(vm))}
        )
        self._outbox.release_kept()
        return is_other

    def reporter(self) -> Reporter:
        """Return what builds events in this VM's name, as far as it is known."""
        epoch = self._outbox.meta("epoch") if self.is_confirmed else self._unconfirmed_epoch
        if self._reporter is None or (self._reporter.epoch, self._reporter.vm) != (epoch, self.vm):
            self._reporter = Reporter(
                name=self.vm.name if self.vm else socket.gethostname(),
                role=self._role,
                epoch=epoch,
                vm=self.vm,
                group_source=self._config.source,
                vm_source=self._config.vm_source,
                session=self._config.approvals.session if self._config.approvals else "",
            )
        return self._reporter

    def next_sequence(self) -> int:
        """Return the number of the next of this process's own events."""
        if self.is_confirmed:
            return self._outbox.count("reporterseq")
        self._unconfirmed_count += 1
        return self._unconfirmed_count

    def notice_clock(self) -> float:
        """Log a jump of the wall clock and keep every age as it was; return the jump in seconds."""
        jump = self._clock.jump_seconds()
        if jump:
            seconds = round(jump, 1)
            log.warning("the wall clock jumped; the ages of events do not change", extra={"seconds": seconds})
            self._outbox.shift(jump)
        return jump

    def emit_heartbeat(self) -> None:
        """Publish a heartbeat at the start and then every hour."""
        now = self._clock.monotonic()
        if now - self._heartbeat_at >= HEARTBEAT_EVERY_SECONDS:
            self._publish("Started" if self._heartbeat_at == -math.inf else "Hourly")
            self._heartbeat_at = now

    def emit_losses(self) -> bool:
        """Publish losses of events; return whether what IMDS shows now must be published again."""
        now = self._clock.monotonic()
        losses = self._outbox.losses()
        if not losses or now < self._losses_at:
            return False
        self._losses_at = now + LOSSES_EVERY_SECONDS
        events = [self._loss(loss) for loss in losses]
        must_repeat = any(loss.reason == DAMAGE and loss.count != 0 for loss in losses)
        meta = {"watch": ""} if must_repeat else {}
        self._outbox.commit(encode_events(events), meta=meta, published=losses)
        return must_repeat

    def _loss(self, loss: Loss) -> CloudEvent:
        oldest, newest = (
            None if at is None else datetime.fromtimestamp(at, UTC) for at in (loss.oldest, loss.newest)
        )
        return self.reporter().loss(
            reason=loss.reason,
            count=loss.count,
            sink=loss.sink,
            oldest=oldest,
            newest=newest,
            sequence=self.next_sequence(),
            at=self._clock.now(),
        )

    def emit_stopping(self) -> None:
        """Publish the last heartbeat of a process that is stopped."""
        self._publish("Stopping")

    def _publish(self, reason: str) -> None:
        event = self.reporter().heartbeat(
            reason=reason,
            version=__version__,
            backlog=self._outbox.backlogs(),
            sequence=self.next_sequence(),
            at=self._clock.now(),
        )
        self._outbox.commit(encode_events([event]), meta={})


def approval_session(template: str, vm: Vm | None) -> str | None:
    """Return a VM's session id in lower case; "" without a template, None while the VM is unknown."""
    if not template:
        return ""
    if vm is None:
        return None
    return template.format(vm=vm.name.lower(), resource_group=vm.resource_group.lower())
