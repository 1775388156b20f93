"""Keep the messages of an entity that requires sessions: a receiver locks a session, not single messages. No I/O."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass

from bridge.lab.servicebus.conditions import NOT_ALLOWED, SESSION_LOCKED, SESSION_LOST, Refused
from bridge.lab.servicebus.config import QueueSettings
from bridge.lab.servicebus.messages import Message
from bridge.lab.servicebus.queues import MessageQueue
from bridge.lab.servicebus.sections import Content
from bridge.lab.servicebus.timers import Timers

NO_SESSION = ("Session ID is null.", "Session enabled entity doesn't allow a message without a session id.")


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """Hold a session: its owner, the end of the lock, and its state."""

    session_id: str
    owner: object | None = None
    locked_until: float = 0.0
    state: bytes | None = None


class SessionQueue(MessageQueue):
    """Keep messages in order within each session."""

    requires_session = True

    def __init__(
        self,
        settings: QueueSettings,
        timers: Timers,
        *,
        changed: Callable[[MessageQueue], None],
        session_lost: Callable[[object], None],
        dead_letters: MessageQueue,
    ) -> None:
        """Start empty.

        Args:
            settings: as of a queue.
            timers: as of a queue.
            changed: as of a queue.
            session_lost: called with the owner of a session whose lock has expired.
            dead_letters: the dead-letter queue.
        """
        super().__init__(settings, timers, changed=changed, dead_letters=dead_letters)
        self._session_lost = session_lost
        self._sessions: dict[str, Session] = {}

    def check(self, content: Content) -> None:
        """Raise Refused for a message without a session."""
        if content.session_id is None:
            raise Refused(
                NOT_ALLOWED,
                "The SessionId was not set on a message, and it cannot be sent to the entity. Entities that have "
                "session support enabled can only receive messages that have the SessionId set to a valid value.",
            )

    def locked(self, token: uuid.UUID, owner: object | None = None) -> Message:
        """Return the message of a lock token; raise Refused if the owner has lost the session."""
        message = self._locked.get(token)
        if message is None:
            raise Refused(SESSION_LOST, "The session lock has expired on the MessageSession.")
        if owner is not None:
            self.held(str(message.content.session_id), owner)
        return message

    def accept_session(self, session_id: str | None, owner: object) -> Session | None:
        """Lock a session, or without an id the first that has a message; None if there is none yet."""
        if session_id is None:
            session_id = self._next_session()
            if session_id is None:
                return None
        session = self._sessions.setdefault(session_id, Session(session_id=session_id))
        if session.owner is not None:
            raise Refused(
                SESSION_LOCKED,
                f"The requested session '{session_id}' cannot be accepted. It may be locked by another receiver.",
            )
        session.owner = owner
        self.renew_session(session_id, owner)
        return session

    def renew_session(self, session_id: str, owner: object) -> float:
        """Renew a session's lock; return when it expires."""
        session = self.held(session_id, owner)
        session.locked_until = self._timers.now() + self.settings.lock_seconds
        for message in self._of(session):
            message.locked_until = session.locked_until
        self._timers.at(session.locked_until, self._session_over, session)
        return session.locked_until

    def release_session(self, session_id: str, owner: object) -> None:
        """Release a session; its messages become available without counting the delivery."""
        session = self._sessions.get(session_id)
        if session is not None and session.owner is owner:
            self._free(session, tried=False)

    def held(self, session_id: str, owner: object) -> Session:
        """Return a session that an owner holds; raise Refused if the lock is lost."""
        session = self._sessions.get(session_id)
        if session is None or session.owner is not owner or owner is None:
            raise Refused(
                SESSION_LOST, f"The session lock of '{session_id}' has expired on the MessageSession."
            )
        return session

    def session_ids(self) -> list[str]:
        """Return the sessions that have messages or state."""
        with_messages = {m.content.session_id for m in self.messages if m.content.session_id is not None}
        return sorted(with_messages | {s.session_id for s in self._sessions.values() if s.state is not None})

    def _add(self, message: Message) -> None:
        super()._add(message)
        if (
            message.content.session_id is None
        ):  # it came through a topic, which accepts messages without a session
            self._move_to_dead_letters(message, *NO_SESSION)

    def _group(self, message: Message) -> str | None:
        return message.content.session_id

    def _lock(self, message: Message) -> None:
        # A deferred message can be received without a session; it then has a lock of its own.
        session = self._sessions.get(str(message.content.session_id))
        if session is not None and session.owner is not None:
            message.locked_until = session.locked_until
        else:
            super()._lock(message)

    def _next_session(self) -> str | None:
        heads = []
        for session_id in list(self._ready):
            session = self._sessions.get(str(session_id))
            if session_id is not None and (session is None or session.owner is None):
                message = self._first(session_id)
                if message is not None:
                    heads.append((message.sequence_number, session_id))
        return min(heads)[1] if heads else None

    def _session_over(self, session: Session) -> None:
        if session.owner is not None and session.locked_until <= self._timers.now():
            owner = session.owner
            self._free(session, tried=True)
            self._session_lost(owner)

    def _free(self, session: Session, *, tried: bool) -> None:
        session.owner = None
        for message in self._of(session):
            self._give_back(message, tried=tried)
        self._changed(self)

    def _of(self, session: Session) -> list[Message]:
        return [m for m in self._locked.values() if m.content.session_id == session.session_id]
