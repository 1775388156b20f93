"""The approval listener's loop: look after the VM by the document, decide about commands, POST, publish, settle.

The outbox keeps records that survive a kill: the intent is committed before the POST, and the outcome together
with its receipt before the message is settled.

I/O: what its parts read and write; the clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from bridge.approvals.approver import READ_EVERY_SECONDS
from bridge.approvals.caretaker import Caretaker
from bridge.approvals.inbox import Inbox
from bridge.approvals.receipts import Receipts
from bridge.azure.receiver import Receiver
from bridge.config.approvals import ApprovalSettings
from bridge.contract.status import ListenStatus
from bridge.process.bridge_events import BridgeEvents
from bridge.process.parts import Parts
from bridge.runtime.program import Run
from bridge.runtime.threads import report_progress
from bridge.runtime.time import iso_utc

PASS_SECONDS = 0.25  # how long a pass waits for messages, while one could matter


@dataclass(eq=False)
class Listener:
    """Decides about commands. `run` and `run_once` are for one thread; `status` may be called from any.

    Args:
        parts: of the process; IMDS is used from the thread that calls `run`, which the stop ends.
        settings: the policy, the auto rules, the grace period and the signing secrets.
        receiver: where commands come from; None without a bus.
        dry_run: decide and publish receipts, but POST nothing.
        make_run: makes a run of a program that an auto rule names.
    """

    parts: Parts
    settings: ApprovalSettings
    receiver: Receiver | None
    _: KW_ONLY
    dry_run: bool = False
    make_run: Callable[..., Run] = Run

    def __post_init__(self) -> None:
        self._clock, self._identity = self.parts.clock, self.parts.identity
        self._bridge_events = BridgeEvents(self._identity)
        self._receipts = Receipts(self.parts, self.receiver, dry_run=self.dry_run)
        self._caretaker = Caretaker(
            self.parts, self.settings, self._receipts, dry_run=self.dry_run, make_run=self.make_run
        )
        self._inbox = Inbox(self.receiver, self._caretaker)

    def run(self) -> None:
        """Decide until the stop, or until the VM has another name; what is not decided by then is delivered again."""
        self._bridge_events.emit_started()
        try:
            while not (self.parts.stop or self._must_end()):
                report_progress()
                self.run_once(self.wait_seconds)
        finally:
            self._caretaker.end_programs()
        self._receipts.report_surplus(at_once=True)
        self._receipts.commit()
        self._bridge_events.emit_stopping()

    def is_busy(self) -> bool:
        """Return whether a program runs; no more once `run` has ended. Any thread may call it."""
        return bool(self._caretaker.runs)

    def is_in_work(self) -> bool:
        """Return whether no program of a rule is known to have taken this VM out of work. Any thread may call it."""
        return self.dry_run or self._caretaker.state.is_in_work

    @property
    def wait_seconds(self) -> float:
        """How long the next pass may wait for messages."""
        may_rest, approver = self._clock.monotonic() >= self._inbox.rest_from, self._caretaker.approver
        pass_seconds = READ_EVERY_SECONDS if may_rest else PASS_SECONDS
        return min(pass_seconds, approver.newer_in_seconds, approver.call_in_seconds)

    def run_once(self, wait_seconds: float) -> None:
        """Make one pass: wait up to `wait_seconds` for messages, decide what can be decided, commit and settle."""
        if self._bridge_events.emit_heartbeat(self._look):
            self._inbox.look_once()
        self._bridge_events.emit_losses()
        self._inbox.receive(wait_seconds)
        self._decide()
        if self._caretaker.approver.newer_in_seconds == 0:
            self._decide()
        self._receipts.report_surplus()
        self._receipts.commit()

    def _must_end(self) -> bool:
        """Return whether the VM has another name, and no program and no command of the one before is left."""
        identity = self._identity
        return identity.is_renamed and not (self.is_busy() or (identity.resolved and self._inbox.pending))

    def _identify(self) -> None:
        identity = self._identity
        document = None if identity.resolved else self._caretaker.approver.reading.document
        identity.resolve(at_once=bool(document and document.events))

    def _decide(self) -> None:
        """Decide what can be decided by the document as it is now, and POST what is allowed."""
        approver = self._caretaker.approver
        last = approver.reading
        self._caretaker.look()
        if approver.reading is not last or not self._identity.vm:
            self._identify()  # which may take a second, and so comes after what prepares the VM
        document = self._caretaker.look()
        self._inbox.decide(document if self._identity.resolved else None)

    def status(self) -> ListenStatus:
        """Return what the status file shows of the listener."""
        caretaker, imds = self._caretaker, self.parts.imds
        good_time = caretaker.approver.reading.good_time
        return ListenStatus(
            vm=self._identity.vm.name if self._identity.vm else None,
            imds=imds.base,
            version_error=imds.version_error,
            clock_ahead_seconds=imds.clock_ahead_seconds,
            last_error=caretaker.last_error or None,
            last_good_at=iso_utc(good_time) if good_time else None,
            waiting_commands=len(self._inbox.pending),
            dry_run=self.dry_run,
            out_of_work=caretaker.out_of_work(),
            auto=caretaker.auto(),
            commands=self.receiver.status() if self.receiver else None,
        )

    def _look(self) -> dict[str, Any]:
        """Return what a heartbeat says of the last look at the bus."""
        if self.receiver is None:
            return {}
        status = self.receiver.status()
        return {"LookedAt": status.looked_at, "LookError": status.last_error}
