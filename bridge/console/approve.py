"""Approve an event from its page: who may, what has to be right, and the command that is sent."""

from __future__ import annotations

import hmac
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from hashlib import sha256
from secrets import token_bytes, token_urlsafe

from bridge.console.access import Person
from bridge.console.rows import EventRow, VmRow
from bridge.imds.document import fold_name
from bridge.imds.instance import Vm, resource_group_of
from bridge.runtime.text import sanitize
from bridge.runtime.time import Clock

log = logging.getLogger(__name__)

COOKIE = "__Host-imds-bridge"
CONFIRM_CHARACTERS = 4
MAX_REASON = 300
_PER_MINUTE = 20
_KEPT_COMMANDS = 1000
COOKIE_SECONDS = 12 * 3600
# What changes while the event stays the same, as reports arrive and time passes. The digest has the rest.
_PASSING = ("approval", "prepared", "last_change_at", "due", "seen", "seen_by_others", "seen_late", "heard")

Send = Callable[[str, Vm, str, str], str]


class NotApproved(Exception):
    """Nothing was sent; the text says why, for the person who asked."""


class Sessions:
    """Proves that a POST comes from a form that an approver was shown; any thread may use it."""

    def __init__(self, key: str = "") -> None:
        """Take a key that other consoles have, too, or make one: then forms do not outlive the process."""
        self._key = key.encode() or token_bytes(32)

    def token(self, session: str, person: Person) -> str:
        """Return what a form holds."""
        return hmac.new(self._key, f"{session}\n{person.name}".encode(), sha256).hexdigest()

    def check(self, person: Person, session: str, given: Mapping[str, str]) -> None:
        """Check the fields of a form.

        Raises:
            NotApproved: it is not the form of this person and session, or the person may not.
        """
        if not person.is_approver:
            raise NotApproved("You are in none of the groups that may approve.")
        token = given.get("token", "").encode("utf-8", "replace")
        if not session or not hmac.compare_digest(token, self.token(session, person).encode()):
            raise NotApproved("The session has expired: open the page again.")


class Approvals(Sessions):
    """Offers and sends approvals; any thread may use it."""

    def __init__(self, *, send: Send, clock: Clock, key: str = "") -> None:
        """Prepare to send.

        Args:
            send: sends a command for an EventId to a VM's listener, with a reason and the person; returns its id.
            clock: limits the rate.
            key: as of `Sessions`.
        """
        super().__init__(key)
        self._send = send
        self._clock = clock
        self._sent_at: deque[float] = deque(maxlen=_PER_MINUTE)
        self._commands: deque[tuple[str, str]] = deque(maxlen=_KEPT_COMMANDS)

    def receiver(self, event: EventRow, vms: Sequence[VmRow], person: Person) -> str | None:
        """Return whose listener gets the command of an event; None if it cannot be approved, or not by this person.

        Args:
            event: the event.
            vms: that Azure tells of it.
            person: who looks.
        """
        if not (person.is_approver and event.state.may_be_approved and event.resources):
            return None
        vm = _listener(event, vms)
        return vm.name if vm else event.resources[0]

    def approve(
        self, event: EventRow, vms: Sequence[VmRow], person: Person, session: str, given: Mapping[str, str]
    ) -> str:
        """Send the command for an event; return its id.

        Args:
            event: as it is now.
            vms: that Azure tells of it.
            person: who asks.
            session: the value of the session's cookie.
            given: the fields of the form.

        Raises:
            NotApproved: something is not right.
            BridgeError: the command could not be sent.
        """
        reason = sanitize(given.get("reason", ""), MAX_REASON)
        self._check(event, person, session, given)
        vm = _listener(event, vms)
        target = Vm(
            name=vm.name if vm else event.resources[0],
            resource_group=resource_group_of(vm.resource_id) if vm else event.group.partition("/")[0],
            subscription_id=(vm or event).subscription,
        )
        command_id = self._send(event.event_id, target, reason, person.name)
        self._commands.append((event.key, command_id))
        audit = {"by": person.name, "event_id": event.event_id, "releases": list(event.resources)}
        log.warning("approval sent", extra={**audit, "reason": reason, "command_id": command_id})
        return command_id

    def has_sent(self, event: EventRow, command_id: str) -> bool:
        """Return whether a command for an event is one of the last that were sent since the start."""
        return (event.key, command_id) in [*self._commands]

    def _check(self, event: EventRow, person: Person, session: str, given: Mapping[str, str]) -> None:
        self.check(person, session, given)
        if not event.state.may_be_approved:
            raise NotApproved(
                f"The event is {sanitize(event.status, 40)} now and cannot be approved any more."
            )
        if given.get("shown") != digest(event):
            raise NotApproved("The event has changed since the page was shown: read it again.")
        if not sanitize(given.get("reason", "")):
            raise NotApproved("An approval needs a reason.")
        if given.get("confirm", "").strip().lower() != event.key[-CONFIRM_CHARACTERS:]:
            raise NotApproved(f"These are not the last {CONFIRM_CHARACTERS} characters of the EventId.")
        now = self._clock.monotonic()
        if len(self._sent_at) == _PER_MINUTE and now - self._sent_at[0] < 60:  # noqa: PLR2004 - a minute
            raise NotApproved(f"More than {_PER_MINUTE} approvals within a minute: wait a moment.")
        self._sent_at.append(now)


def new_session() -> str:
    """Return a new session, which a cookie keeps."""
    return token_urlsafe(24)


def digest(event: EventRow) -> str:
    """Return what identifies the content of an event's form."""
    shown = repr([getattr(event, one.name) for one in fields(event) if one.name not in _PASSING])
    return sha256(shown.encode("utf-8", "replace")).hexdigest()[:32]


def _listener(event: EventRow, vms: Sequence[VmRow]) -> VmRow | None:
    """Return the first affected VM that is heard of, else the first one that has reported."""
    by_name = {vm.folded: vm for vm in vms}
    found = [by_name[name] for name in map(fold_name, event.resources) if name in by_name]
    heard = [vm for vm in found if vm.watch in ("watched", "unreachable")]
    return next(iter(heard or found), None)
