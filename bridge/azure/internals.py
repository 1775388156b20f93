"""Everything that imds-bridge uses of azure-servicebus beyond its documented interface, in one place.

The SDK offers no documented way to do what stands here. pyproject.toml bounds its version, and a test fails
when one of these attributes is gone.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from azure.servicebus import ServiceBusReceivedMessage
from azure.servicebus._pyamqp import receiver as receiver_link
from azure.servicebus._pyamqp._decode import decode_payload
from azure.servicebus._pyamqp.error import MessageException
from azure.servicebus._pyamqp.message import Message
from azure.servicebus._transport import _pyamqp_transport
from azure.servicebus.amqp import AmqpMessageBodyType
from azure.servicebus.exceptions import ServiceBusError

log = logging.getLogger(__name__)

_NO_TEXT = "its body is an AMQP {}, expected a text or bytes"
_KINDS = {dict: "map", list: "list", int: "number", float: "number", bool: "boolean"}
_FAULT = "imds-bridge: undecodable"  # a name that no sender can set: the SDK decodes names to bytes


def close_socket_on_close(handler: Any) -> None:
    """Make a sender or receiver close its socket, too.

    When the peer has cut the connection, the SDK leaves the socket open until it is garbage-collected.
    """
    close = handler._close_handler

    def close_all() -> None:
        transport = _transport(handler)
        try:
            close()
        finally:
            if transport is not None:
                transport.close()

    handler._close_handler = close_all


class _Always(threading.Event):
    """An event that stays set."""

    def clear(self) -> None:
        """Change nothing."""


def keep_what_arrives(receiver: Any) -> None:
    """Make a receiver keep what arrives between two of its receive calls, for the next one.

    The SDK gives it back to the bus and gets it again, behind others: where a receive call returns before all that
    it asked for has come, as on a busy machine, the same messages came dozens of times. What is kept is at most what
    the last call asked for.
    """
    receiver._receive_context = _Always()
    receiver._receive_context.set()


def abort_connection(handler: Any) -> None:
    """Shut the socket down, from any thread, so that a call that hangs on it fails.

    The SDK has no call to do so: `close` waits for the peer.
    """
    with contextlib.suppress(AttributeError, OSError):
        _transport(handler).sock.shutdown(socket.SHUT_RDWR)


def _transport(handler: Any) -> Any:
    """Return the transport below a sender or receiver, None while it is not connected."""
    client = handler._handler
    connection = client._connection if client is not None else None
    return connection._transport if connection is not None else None


def is_shut_down(receiver: Any) -> bool:
    """Return whether the SDK has closed a receiver's link on its own; it then returns no message ever again."""
    client = receiver._handler
    return client is not None and bool(client._shutdown)


def renew_locks(receiver: Any, received: Sequence[ServiceBusReceivedMessage]) -> list[datetime]:
    """Renew the locks of messages in one request; return until when each is locked.

    The SDK's own method makes a request for each message, and a thousand can be waiting.

    Raises:
        ServiceBusError: none was renewed, because at least one lock is lost.
    """
    answer = receiver._renew_locks(*[message.lock_token for message in received])
    expirations = [datetime.fromtimestamp(at / 1000, UTC) for at in answer[b"expirations"]]
    for message, until in zip(received, expirations, strict=True):
        message._expiry = until
    return expirations


def release(receiver: Any, received: Sequence[ServiceBusReceivedMessage]) -> None:
    """Make messages available to other receivers at once; Service Bus does not count it as a delivery.

    The SDK releases only what arrives while nothing is being received. The receiver's credit is withdrawn first, or
    the same messages would come back to it.
    """
    handler = receiver._handler
    handler._link.flow(link_credit=0)
    for message in received:
        handler.settle_messages(message._delivery_id, message._delivery_tag, "released")


class TransferRefusedError(ServiceBusError):
    """The broker answers that it does not take what was sent; the link stays usable."""


def adapt_sdk() -> None:
    """Make the SDK deliver messages that it cannot decode, and keep a link over which the broker refuses a transfer.

    On a char, a decimal or a list nested over 64 deep, 7.15 raises or closes its receiver. Such a message arrives
    empty, and `fault_of` says why. Refusals that it has no class of errors for, such as `amqp:not-allowed`, it takes
    for lost links.
    """
    for module in (receiver_link, _pyamqp_transport):
        module.__dict__["decode_payload"] = _decode
    errors: dict[Any, Any] = _pyamqp_transport._ERROR_CODE_TO_ERROR_MAPPING
    errors.update({condition: _refused for condition, kind in errors.items() if kind is ServiceBusError})


def _refused(*, error: Any = None, **given: Any) -> ServiceBusError:
    if isinstance(error, MessageException):  # not one about the link
        return TransferRefusedError(error=error, shutdown_handler=False, **given)
    return ServiceBusError(error=error, **given)


def fault_of(received: ServiceBusReceivedMessage) -> str:
    """Return why a message could not be decoded, or has no text as its body; "" if neither is so."""
    message = received.raw_amqp_message
    if isinstance(message.annotations, dict) and _FAULT in message.annotations:
        return str(message.annotations[_FAULT])
    if message.body_type == AmqpMessageBodyType.SEQUENCE:
        return _NO_TEXT.format("sequence")
    is_value = message.body_type == AmqpMessageBodyType.VALUE
    is_text = not is_value or isinstance(message.body, str | bytes | None)
    return "" if is_text else _NO_TEXT.format(_KINDS.get(type(message.body), "value"))


def _decode(payload: memoryview) -> Message:
    """Decode a message, or return an empty one that says why this is impossible.

    A message is settled by what its transfer carries, so that it needs no values of its own for that.
    """
    try:
        message = decode_payload(payload)
        _check_types(message)
    except Exception as error:
        log.debug("a message that the SDK cannot decode", exc_info=error)
        fault = "it has a value that the SDK cannot decode, of an AMQP type such as char or decimal"
        return Message(message_annotations={_FAULT: fault}, data=[b""])
    return message


def _check_types(message: Message) -> None:
    for name in ("delivery_annotations", "message_annotations", "application_properties", "footer"):
        if not isinstance(getattr(message, name), dict | None):
            raise TypeError(f"{name} is not a map")
