"""The links for requests and replies: $cbs, and $management of each entity."""

from __future__ import annotations

import uuid
from collections import deque
from typing import TYPE_CHECKING, Any

from bridge.lab.servicebus import cbs
from bridge.lab.servicebus.codec import Int, Malformed
from bridge.lab.servicebus.conditions import BUSY, DECODE, Refused
from bridge.lab.servicebus.links import CREDIT, SEND_REFUSALS, Consumer, Endpoint, mirror, reject
from bridge.lab.servicebus.management import ManagementHandler
from bridge.lab.servicebus.peer import Peer, proton
from bridge.lab.servicebus.sections import Content, parse, reply

if TYPE_CHECKING:
    from bridge.lab.servicebus.amqp import Bus

UNAUTHORIZED_STATUS = 401


class ReplyLink(Endpoint):
    """Send replies to a client, as far as it has granted credit."""

    def __init__(self, bus: Bus, peer: Peer, link: Any, path: str) -> None:
        super().__init__(bus, peer, link, path)
        self._waiting: deque[bytes] = deque()
        mirror(link)
        link.open()

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
        self.peer.loop.dirty.add(self.peer)


class RequestLink(Endpoint):
    """Receive requests, one per transfer."""

    def __init__(self, bus: Bus, peer: Peer, link: Any, path: str) -> None:
        super().__init__(bus, peer, link, path)
        mirror(link)
        link.open()
        link.flow(CREDIT)

    def delivered(self, delivery: Any) -> None:
        """Answer a complete request."""
        if delivery.partial or not delivery.readable:
            return
        if self.bus.connection_faults.stalls(self.peer, self.path, lambda: self.delivered(delivery)):
            return
        data = bytes(self.link.recv(delivery.pending) or b"")
        self.link.advance()
        self.link.flow(1)
        try:
            request = parse(data)
            request.value  # noqa: B018 - parsed here, where an error can still be answered
        except Malformed as error:
            reject(delivery, Refused(DECODE, str(error)))
            return
        delivery.update(proton.Delivery.ACCEPTED)
        delivery.settle()
        answer = self.answer(request)
        if answer is not None:
            self._send(request, answer)

    def answer(self, request: Content) -> bytes | None:
        """Return the reply, or None for no reply."""
        raise NotImplementedError

    def _send(self, request: Content, answer: bytes) -> None:
        wanted = request.properties.get("reply_to")
        links = [e for e in self.peer.context.endpoints if isinstance(e, ReplyLink)]
        here = [e for e in links if e.path == self.path]
        named = [
            e for e in here if wanted is not None and wanted in (e.link.remote_target.address, e.link.name)
        ]
        for link in (named or here)[:1]:
            link.put(answer)


class CbsNode(RequestLink):
    """Receive tokens."""

    def answer(self, request: Content) -> bytes | None:
        """Return the answer to a token."""
        if self.bus.faults.applies("silent_cbs"):
            return None
        result = cbs.check_token(request, key_name=self.bus.key_name, key=self.bus.key, now=self.bus.now())
        if result.accepted and self.bus.faults.applies("refuse_cbs", result.path):
            result = cbs.TokenResult(
                status_code=UNAUTHORIZED_STATUS,
                description="InvalidSignature: The token has an invalid signature.",
            )
        if result.accepted:
            self.peer.context.opened_paths.add(result.path)
        status = {"status-code": Int(result.status_code), "status-description": result.description}
        return reply(request.properties.get("message_id"), status)


class ManagementNode(RequestLink):
    """Receive requests about the messages of an entity."""

    def answer(self, request: Content) -> bytes | None:
        """Return the reply to a management request."""
        if self.bus.faults.applies("busy", self.path):
            refused = SEND_REFUSALS["busy"]
            status = {
                "statusCode": Int(refused.status_code),
                "statusDescription": refused.description,
                "errorCondition": BUSY,
            }
            return reply(request.properties.get("message_id"), status)
        return ManagementHandler(self.bus.broker, self.path, self._owner).answer(request)

    def _owner(self, session_id: str) -> object | None:
        for endpoint in self.peer.context.endpoints:
            if (
                isinstance(endpoint, Consumer)
                and endpoint.path == self.path
                and endpoint.session_id == session_id
            ):
                return endpoint
        return None
