"""Dispatch proton's events to links, and messages from queues to the links with credit."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urlsplit

from bridge.lab.servicebus.amqp import proton
from bridge.lab.servicebus.connection import Connection, Service
from bridge.lab.servicebus.links import Consumer, Endpoint, Producer, refuse
from bridge.lab.servicebus.messages import NOT_IMPLEMENTED, UNAUTHORIZED, Refused
from bridge.lab.servicebus.nodes import CBS, MANAGEMENT_SUFFIX, CbsNode, ManagementNode, ReplyLink

CONTAINER = "imds-bridge-lab"


class Bus(Service):
    """The service: its links, by what proton reports of connections."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.handlers = {
            proton.Event.CONNECTION_REMOTE_OPEN: self._connection_opened,
            proton.Event.CONNECTION_REMOTE_CLOSE: self._connection_closed,
            proton.Event.SESSION_REMOTE_OPEN: lambda _, event: event.session.open(),
            proton.Event.SESSION_REMOTE_CLOSE: self._session_closed,
            proton.Event.LINK_REMOTE_OPEN: lambda connection, event: self._attach(connection, event.link),
            proton.Event.LINK_REMOTE_CLOSE: self._link_closed,
            proton.Event.LINK_REMOTE_DETACH: self._link_closed,
            proton.Event.LINK_FLOW: self._link_flowed,
            proton.Event.DELIVERY: self._delivered,
            proton.Event.TRANSPORT_ERROR: lambda connection, _: connection.end(),
        }

    # --- connections ---

    def _connection_opened(self, _: Connection, event: Any) -> None:
        event.connection.container = CONTAINER
        event.connection.open()

    def _connection_closed(self, connection: Connection, event: Any) -> None:
        event.connection.close()
        connection.end()

    def _session_closed(self, connection: Connection, event: Any) -> None:
        for endpoint in list(connection.endpoints):
            if endpoint.link.session == event.session:
                self.drop(endpoint)
        event.session.close()

    # --- links ---

    def _attach(self, connection: Connection, link: Any) -> None:
        terminus = link.remote_target if link.is_receiver else link.remote_source
        address = terminus.address or ""
        path = unquote(urlsplit(address).path if "://" in address else address).strip("/")
        try:
            if self.intercept("attach", connection, _entity(path), lambda: self._attach(connection, link)):
                return
            endpoint = self._endpoint(connection, link, path)
        except Refused as refused:
            refuse(link, refused)
            return
        link.lab = endpoint
        connection.endpoints.add(endpoint)
        if isinstance(endpoint, Consumer):
            self.consumers[endpoint.queue].append(endpoint)
            self.open(endpoint)

    def _endpoint(self, connection: Connection, link: Any, path: str) -> Endpoint:
        if not path:
            raise Refused(NOT_IMPLEMENTED, "The lab supports neither transactions nor dynamic nodes.")
        entity = _entity(path)
        if path != CBS:
            self.broker.find(entity)
            if not connection.may_use(entity):
                raise Refused(
                    UNAUTHORIZED, f"Unauthorized access. There is no token for the entity '{entity}'."
                )
        kind: type[Endpoint] = Producer if link.is_receiver else Consumer
        if path == CBS:
            kind = CbsNode if link.is_receiver else ReplyLink
        elif path != entity:
            kind = ManagementNode if link.is_receiver else ReplyLink
        return kind(self, connection, link, entity)

    def _link_flowed(self, _: Connection, event: Any) -> None:
        if endpoint := getattr(event.link, "lab", None):
            endpoint.flowed()

    def _delivered(self, _: Connection, event: Any) -> None:
        if endpoint := getattr(event.link, "lab", None):
            endpoint.delivered(event.delivery)

    def _link_closed(self, _: Connection, event: Any) -> None:
        if endpoint := getattr(event.link, "lab", None):
            self.drop(endpoint)
        if event.link.state & proton.Endpoint.LOCAL_ACTIVE:
            event.link.close()


def _entity(path: str) -> str:
    return path[: -len(MANAGEMENT_SUFFIX)] if path.lower().endswith(MANAGEMENT_SUFFIX) else path
