"""The nodes that answer requests: $cbs, and $management of each entity."""

from __future__ import annotations

import base64
import hashlib
import hmac
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

from bridge.lab.servicebus.amqp import proton
from bridge.lab.servicebus.connection import Connection, Service
from bridge.lab.servicebus.links import CREDIT, Consumer, Endpoint, reject
from bridge.lab.servicebus.messages import ARGUMENT, DECODE, NOT_ALLOWED, NOT_IMPLEMENTED, Refused
from bridge.lab.servicebus.queues import MessageQueue

CBS = "$cbs"
MANAGEMENT_SUFFIX = "/$management"
PREFIX = "com.microsoft:"
MAX_PEEKED = 1000
_SAS = "SharedAccessSignature "

Body = dict[str, Any]


class ReplyLink(Endpoint):
    """Send replies to a client, as far as it has granted credit."""

    def __init__(self, bus: Service, connection: Connection, link: Any, path: str) -> None:
        super().__init__(bus, connection, link, path)
        self._waiting: deque[bytes] = deque()
        self.attach()

    def put(self, data: bytes) -> None:
        """Send a reply, or keep it until there is credit."""
        self._waiting.append(data)
        self.flowed()

    def flowed(self) -> None:
        """Send the replies that wait for credit."""
        while self._waiting and self.link.credit > 0:
            delivery = self.link.delivery(uuid.uuid4().bytes)
            self.link.send(self._waiting.popleft())
            self.link.advance()
            delivery.settle()
        self.bus.send_later(self.connection)


class RequestLink(Endpoint):
    """Receive requests, one per transfer."""

    def __init__(self, bus: Service, connection: Connection, link: Any, path: str) -> None:
        super().__init__(bus, connection, link, path)
        self.attach()
        link.flow(CREDIT)

    def delivered(self, delivery: Any) -> None:
        """Answer a complete request."""
        if delivery.partial or not delivery.readable or self.intercepted("ask", delivery):
            return
        request = proton.Message()
        data = self.read()
        self.link.flow(1)
        try:
            request.decode(data)
        except (proton.ProtonException, ValueError, TypeError) as error:
            reject(delivery, Refused(DECODE, str(error)))
            return
        delivery.update(proton.Delivery.ACCEPTED)
        delivery.settle()
        self._reply(request, *self.answer(request))

    def answer(self, request: Any) -> tuple[Body, Body | None]:
        """Return the properties and the body of the reply; no properties for no reply."""
        raise NotImplementedError

    def _reply(self, request: Any, properties: Body, body: Body | None) -> None:
        links = [
            one for one in self.connection.endpoints if isinstance(one, ReplyLink) and one.path == self.path
        ]
        named = [one for one in links if request.reply_to in (one.link.remote_target.address, one.link.name)]
        if not properties or not links:
            return
        message = proton.Message(body=body, properties=properties, correlation_id=request.id)
        message.inferred = False
        (named or links)[0].put(message.encode())


class CbsNode(RequestLink):
    """Receive tokens."""

    def answer(self, request: Any) -> tuple[Body, Body | None]:
        """Return the answer to a put-token request."""
        address = str((request.properties or {}).get("name", ""))
        # npm's client sends a separate token for an entity's management node.
        path = urlsplit(address).path.strip("/").lower().removesuffix(MANAGEMENT_SUFFIX)
        try:
            if self.bus.intercept("token", self.connection, path, lambda: None):
                return {}, None
            check_token(request, key_name=self.bus.key_name, key=self.bus.key)
            self.connection.allowed.add(f"{path}/" if path else "")
        except Refused as refused:
            return {"status-code": proton.int32(401), "status-description": refused.description}, None
        return {"status-code": proton.int32(202), "status-description": "Accepted"}, None


def check_token(request: Any, *, key_name: str, key: str) -> None:
    """Raise Refused unless a put-token request brings a token that the lab accepts.

    The lab has no tenant: it accepts any token that is not signed with a key. The request's `type` does not help:
    azure-servicebus also sends "jwt" for SAS tokens.
    """
    token = request.body
    if (request.properties or {}).get("operation") != "put-token" or not isinstance(token, str) or not token:
        raise Refused(ARGUMENT, "InvalidToken: The request carries no token.")
    if not token.startswith(_SAS):
        return
    token = token.removeprefix(_SAS)
    fields = {name: values[0] for name, values in parse_qs(token).items()}
    # The signature covers the resource as encoded in the token.
    resource = dict(part.partition("=")[::2] for part in token.split("&")).get("sr", "")
    signed = f"{resource}\n{fields.get('se', '')}".encode()
    digest = base64.b64encode(hmac.new(key.encode(), signed, hashlib.sha256).digest()).decode()
    given = fields.get("sig", "").replace(" ", "+")
    if fields.get("skn") != key_name or not hmac.compare_digest(given, digest):
        raise Refused(ARGUMENT, "InvalidSignature: The token has an invalid signature.")


class ManagementNode(RequestLink):
    """Receive requests about the messages of an entity."""

    def answer(self, request: Any) -> tuple[Body, Body | None]:
        """Return the reply to a management request."""
        try:
            if self.intercepted("manage"):
                return {}, None
            session_id = request.body.get("session-id") if isinstance(request.body, dict) else None
            body = manage(self.bus.broker.source(self.path), request, self._owner(session_id))
        except Refused as refused:
            return {
                "statusCode": proton.int32(refused.status_code),
                "statusDescription": refused.description,
                "errorCondition": proton.symbol(refused.condition),  # .NET takes no text for it
            }, None
        return {"statusCode": proton.int32(204 if body is None else 200), "statusDescription": "OK"}, body

    def _owner(self, session_id: str | None) -> object | None:
        """Return the link of this connection that holds the session, or None."""
        for one in self.connection.endpoints:
            if isinstance(one, Consumer) and one.path == self.path and one.session_id == session_id:
                return one if session_id is not None else None
        return None


def manage(queue: MessageQueue, request: Any, owner: object | None) -> Body | None:
    """Do what a request asks for; return the body of the answer, None for an empty one.

    Args:
        queue: of the entity.
        request: proton's message.
        owner: who holds the session that it names.

    Raises: Refused.
    """
    name = str((request.properties or {}).get("operation", ""))
    operation = OPERATIONS.get(name.removeprefix(PREFIX))
    if operation is None:
        raise Refused(NOT_IMPLEMENTED, f"The lab does not know the operation '{name}'.")
    try:
        return operation(queue, request.body, owner)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Refused(ARGUMENT, f"The body of '{name}' is invalid: {error!r}") from error


def _renew_lock(queue: MessageQueue, body: Body, _: object) -> Body:
    renewed = [_milliseconds(queue.renew(token)) for token in body["lock-tokens"]]
    return {"expirations": proton.Array(proton.UNDESCRIBED, proton.Data.TIMESTAMP, *renewed)}


def _renew_session_lock(queue: MessageQueue, body: Body, owner: object | None) -> Body:
    if not queue.requires_session:
        raise Refused(NOT_ALLOWED, f"The entity '{queue.name}' does not require sessions.")
    return {"expiration": _milliseconds(queue.renew_session(body["session-id"], owner))}


def _update_disposition(queue: MessageQueue, body: Body, owner: object | None) -> None:
    status = body["disposition-status"]
    if status not in ("completed", "abandoned", "suspended"):
        raise Refused(NOT_IMPLEMENTED, f"The lab does not settle a message as '{status}'.")
    for token in body["lock-tokens"]:
        queue.locked(token, (owner or object()) if queue.requires_session else None)
        if status == "completed":
            queue.complete(token)
            continue
        queue.change(token, body.get("properties-to-modify") or {})
        if status == "abandoned":
            queue.abandon(token)
        else:
            queue.dead_letter(token, body.get("deadletter-reason"), body.get("deadletter-description"))


def _peek(queue: MessageQueue, body: Body, _: object) -> Body | None:
    count = min(body["message-count"], MAX_PEEKED)
    found = queue.peek(body["from-sequence-number"], count, body.get("session-id"))
    return {"messages": [{"message": message.encode()} for message in found]} if found else None


def _milliseconds(at: float) -> Any:
    return proton.timestamp(int(at * 1000))


OPERATIONS: dict[str, Callable[[MessageQueue, Body, object | None], Body | None]] = {
    "renew-lock": _renew_lock,
    "renew-session-lock": _renew_session_lock,
    "update-disposition": _update_disposition,
    "peek-message": _peek,
}
