"""Answer the requests of clients to the node $management of an entity. No I/O."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from bridge.lab.servicebus.broker import Broker
from bridge.lab.servicebus.codec import LONG as LONG_CODE
from bridge.lab.servicebus.codec import STRING as STRING_CODE
from bridge.lab.servicebus.codec import TIMESTAMP, Array, Described, Int, Malformed, Timestamp
from bridge.lab.servicebus.conditions import ARGUMENT, NOT_ALLOWED, NOT_IMPLEMENTED, Refused
from bridge.lab.servicebus.filters import Correlation, Rule, Sql
from bridge.lab.servicebus.messages import Message
from bridge.lab.servicebus.queues import MessageQueue
from bridge.lab.servicebus.sections import Content, parse, reply
from bridge.lab.servicebus.sessions import SessionQueue

PREFIX = "com.microsoft:"
RECEIVE_AND_DELETE = 0
MAX_PEEKED = 1000
MAX_RULES = 100
OK, ACCEPTED_EMPTY = 200, 204
# The descriptors of a rule and its parts.
RULE, EMPTY_ACTION = 0x0000013700000004, 0x0000013700000005
SQL_FILTER, TRUE_FILTER, CORRELATION_FILTER = 0x000001370000006, 0x000001370000007, 0x000001370000009
# The order in which a correlation filter lists its properties.
CORRELATION_PROPERTIES = (
    "correlation_id",
    "message_id",
    "to",
    "reply_to",
    "subject",
    "session_id",
    "reply_to_session_id",
    "content_type",
)

Body = dict[str, Any]
# Returns the body of the answer, or None for an empty result.
Operation = Callable[["ManagementHandler", Body], Body | None]


class ManagementHandler:
    """Answer requests about one entity from the client of one connection."""

    def __init__(self, broker: Broker, path: str, owner_of: Callable[[str], object | None]) -> None:
        """Take the entity and its owner.

        Args:
            broker: holds the entities.
            path: the entity's path.
            owner_of: returns the link of this connection that holds a session, or None.
        """
        self.broker = broker
        self.path = path
        self.owner_of = owner_of

    def answer(self, request: Content) -> bytes:
        """Return the reply to a request."""
        try:
            body = self._do(request)
            status: Body = {
                "statusCode": Int(OK if body is not None else ACCEPTED_EMPTY),
                "statusDescription": "OK",
            }
        except Refused as refused:
            body = None
            status = {
                "statusCode": Int(refused.status_code),
                "statusDescription": refused.description,
                "errorCondition": refused.condition,
            }
        return reply(request.properties.get("message_id"), status, body)

    def _do(self, request: Content) -> Body | None:
        name = str(request.application_properties.get("operation", ""))
        operation = OPERATIONS.get(name.removeprefix(PREFIX))
        if operation is None:
            raise Refused(NOT_IMPLEMENTED, f"The lab does not know the operation '{name}'.")
        if not isinstance(request.value, dict):
            raise Refused(ARGUMENT, "The request has no map as its body.")
        try:
            return operation(self, request.value)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Refused(ARGUMENT, f"The body of '{name}' is invalid: {error!r}") from error

    @property
    def queue(self) -> MessageQueue:
        """Return the entity as a source of messages."""
        return self.broker.source(self.path)

    @property
    def sessions(self) -> SessionQueue:
        """Return the entity as a session queue; raise Refused if it has no sessions."""
        queue = self.queue
        if not isinstance(queue, SessionQueue):
            raise Refused(NOT_ALLOWED, f"The entity '{self.path}' does not require sessions.")
        return queue

    def owner(self, body: Body) -> object | None:
        """Return the holder of the session in a request; raise Refused if this connection does not hold it."""
        session_id = body.get("session-id")
        if session_id is None:
            return None
        owner = self.owner_of(session_id)
        self.sessions.held(session_id, owner)
        return owner


def _renew_lock(handler: ManagementHandler, body: Body) -> Body:
    expirations = [_milliseconds(handler.queue.renew(token)) for token in body["lock-tokens"]]
    return {"expirations": Array(TIMESTAMP, expirations)}


def _renew_session_lock(handler: ManagementHandler, body: Body) -> Body:
    until = handler.sessions.renew_session(body["session-id"], handler.owner(body))
    return {"expiration": Timestamp(_milliseconds(until))}


def _get_session_state(handler: ManagementHandler, body: Body) -> Body:
    return {"session-state": handler.sessions.held(body["session-id"], handler.owner(body)).state}


def _set_session_state(handler: ManagementHandler, body: Body) -> Body:
    handler.sessions.held(body["session-id"], handler.owner(body)).state = body.get("session-state")
    return {}


def _get_message_sessions(handler: ManagementHandler, body: Body) -> Body | None:
    skip = body.get("skip", 0)
    found = handler.sessions.session_ids()[skip : skip + body.get("top", 100)]
    return {"skip": skip + len(found), "sessions-ids": Array(STRING_CODE, found)} if found else None


def _peek(handler: ManagementHandler, body: Body) -> Body | None:
    count = min(body["message-count"], MAX_PEEKED)
    found = handler.queue.peek(body["from-sequence-number"], count, body.get("session-id"))
    return {"messages": [{"message": message.encode()} for message in found]} if found else None


def _receive_by_number(handler: ManagementHandler, body: Body) -> Body:
    destructive = body.get("receiver-settle-mode", 1) == RECEIVE_AND_DELETE
    handler.owner(body)
    found = handler.queue.take_deferred(body["sequence-numbers"], destructive=destructive)
    return {"messages": [_with_lock(message) for message in found]}


def _with_lock(message: Message) -> Body:
    lock = {} if message.lock_token is None else {"lock-token": message.lock_token}
    return {"message": message.encode(), **lock}


def _schedule(handler: ManagementHandler, body: Body) -> Body:
    entries = [_scheduled(entry["message"]) for entry in body["messages"]]
    return {"sequence-numbers": Array(LONG_CODE, handler.broker.schedule(handler.path, entries))}


def _scheduled(data: bytes) -> tuple[Content, float]:
    try:
        content = parse(data)
    except Malformed as error:
        raise Refused(ARGUMENT, str(error)) from error
    if content.scheduled_for is None:
        raise Refused(ARGUMENT, "A message to be scheduled names no time.")
    return content, content.scheduled_for


def _cancel(handler: ManagementHandler, body: Body) -> Body:
    handler.broker.cancel(handler.path, body["sequence-numbers"])
    return {}


def _update_disposition(handler: ManagementHandler, body: Body) -> Body:
    queue, status = handler.queue, body["disposition-status"]
    reason, description = body.get("deadletter-reason"), body.get("deadletter-description")
    settle: dict[str, Callable[[uuid.UUID], None]] = {
        "completed": queue.complete,
        "abandoned": queue.abandon,
        "defered": queue.defer,
        "suspended": lambda token: queue.dead_letter(token, reason, description),
    }
    tokens: Sequence[uuid.UUID] = body["lock-tokens"]
    owner = handler.owner(body)
    for token in tokens:
        queue.locked(token, owner)
    for token in tokens:
        queue.change(token, body.get("properties-to-modify") or {})
        settle[status](token)
    return {}


def _enumerate_rules(handler: ManagementHandler, body: Body) -> Body:
    skip = body.get("skip", 0)
    found = handler.broker.rules(handler.path)[skip : skip + body.get("top", MAX_RULES)]
    return {"rules": [{"rule-description": _rule(rule)} for rule in found]}


def _rule(rule: Rule) -> Described:
    """Describe a rule; its action is empty, as the lab runs none."""
    matches = rule.matches
    if isinstance(matches, Sql):
        condition = Described(SQL_FILTER, [matches.expression])
    elif isinstance(matches, Correlation):
        properties = [matches.system.get(name) for name in CORRELATION_PROPERTIES]
        condition = Described(CORRELATION_FILTER, [*properties, dict(matches.application)])
    else:
        condition = Described(TRUE_FILTER, [])
    return Described(RULE, [condition, Described(EMPTY_ACTION, []), rule.name])


def _milliseconds(at: float) -> int:
    return int(at * 1000)


OPERATIONS: dict[str, Operation] = {
    "renew-lock": _renew_lock,
    "renew-session-lock": _renew_session_lock,
    "get-session-state": _get_session_state,
    "set-session-state": _set_session_state,
    "get-message-sessions": _get_message_sessions,
    "peek-message": _peek,
    "receive-by-sequence-number": _receive_by_number,
    "schedule-message": _schedule,
    "cancel-scheduled-message": _cancel,
    "update-disposition": _update_disposition,
    "enumerate-rules": _enumerate_rules,
}
