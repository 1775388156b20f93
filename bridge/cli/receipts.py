"""Wait for the receipts of a command, and believe only those that the listener can have written."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bridge.azure.bus_receiver import convert
from bridge.azure.receiver import ReceivedMessage
from bridge.azure.servicebus import address_of, connect, delivery_error
from bridge.config.approvals import ApprovalSettings
from bridge.contract.types import KNOWN_VALUES, type_of
from bridge.errors import BridgeError, UsageError
from bridge.http.signing import signature_fault

ANSWER_SECONDS = 15.0
PEEK_SECONDS = 0.5
PEEK_MESSAGES = 100


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What a receipt says about one EventId; "" stands for all of a command that could not be read."""

    event_id: str
    outcome: str
    reason: str
    detail: str
    resources: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class IgnoredReceipt:
    """A message that looks like a receipt of the command, and why it is not believed."""

    message_id: str
    fault: str


def parse_receipt(body: bytes, command_id: str) -> Receipt | None:
    """Read a receipt of a command; None if the message is anything else."""
    try:
        envelope = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(envelope, dict) or envelope.get("causationid") != command_id:
        return None
    data = envelope.get("data")
    if not isinstance(data, dict) or data.get("Outcome") not in KNOWN_VALUES["Outcome"]:
        return None
    if envelope.get("type") != type_of(f"approval.{data['Outcome'].lower()}"):
        return None
    resources = data.get("Resources")
    return Receipt(
        event_id=_text(data, "EventId"),
        outcome=data["Outcome"],
        reason=_text(data, "Reason"),
        detail=_text(data, "Detail"),
        resources=tuple(map(str, resources)) if isinstance(resources, list) else (),
    )


def _text(data: Mapping[str, Any], name: str) -> str:
    value = data.get(name)
    return value if isinstance(value, str) else ""


def receipts_settings(settings: ApprovalSettings) -> ApprovalSettings:
    """Return the settings of the subscription that receipts arrive in.

    Raises:
        UsageError: the configuration names none.
    """
    topic, subscription = settings.receipts_topic, settings.receipts_subscription
    if not topic or not subscription:
        raise UsageError("approve: --wait needs receipts_topic and receipts_subscription in [approvals]")
    return settings.model_copy(update={"queue": "", "topic": topic, "subscription": subscription})


@contextmanager
def open_receipts(settings: ApprovalSettings) -> Iterator[Receipts]:
    """Open the subscription that receipts arrive in and look into it: it must work before a command is sent.

    Raises:
        UsageError: the configuration names none.
        DeliveryError: it cannot be read.
    """
    source = receipts_settings(settings)
    try:
        with (
            connect(source) as client,
            client.get_subscription_receiver(source.topic, source.subscription) as receiver,
        ):
            receiver.peek_messages(1, timeout=ANSWER_SECONDS)
            yield Receipts(receiver, settings)
    except BridgeError:
        raise
    except Exception as error:
        raise delivery_error(error, f"{address_of(source)}/{source.subscription}") from error


class Receipts:
    """The receipts in a subscription, which are read and left where they are."""

    def __init__(self, receiver: Any, settings: ApprovalSettings) -> None:
        """Read from `receiver`, the SDK's; `settings` have the secrets that receipts must be signed with."""
        self._receiver = receiver
        self._secrets = settings.signing_secrets.read().split() if settings.signing_secrets else []

    def wait(
        self, command_id: str, event_ids: Sequence[str], *, limit_seconds: float
    ) -> Iterator[Receipt | IgnoredReceipt]:
        """Yield what is found, until each EventId has a receipt or the time is over.

        Args:
            command_id: the command's id, which its receipts carry as `causationid`.
            event_ids: of the command.
            limit_seconds: how long to wait.
        """
        missing = {event_id.lower() for event_id in event_ids}
        for message in self._messages(time.monotonic() + limit_seconds):
            receipt = parse_receipt(message.body, command_id)
            if receipt is None or (receipt.event_id and receipt.event_id.lower() not in missing):
                continue
            if fault := self._fault(message):
                yield IgnoredReceipt(message_id=message.message_id, fault=fault)
                continue
            yield receipt
            missing -= {receipt.event_id.lower()} if receipt.event_id else missing
            if not missing:
                return

    def _fault(self, message: ReceivedMessage) -> str:
        if not self._secrets:
            return ""
        return signature_fault(
            self._secrets, message.properties, message.body, signed_near=message.enqueued_at
        )

    def _messages(self, deadline: float) -> Iterator[ReceivedMessage]:
        """Yield all messages that can be decoded, and new ones until the deadline."""
        number = 1
        while True:
            page = self._receiver.peek_messages(PEEK_MESSAGES, sequence_number=number, timeout=ANSWER_SECONDS)
            messages = [convert(message, 0) for message in page]
            yield from (message for message in messages if not message.fault)
            if time.monotonic() >= deadline:
                return
            number = 1 + max((one.sequence_number or 0 for one in messages), default=number - 1)
            if not messages:
                time.sleep(PEEK_SECONDS)  # Ctrl-C ends it
