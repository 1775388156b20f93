"""Standard Webhooks signatures: made for what goes out, checked on commands that come in."""

from __future__ import annotations

import hmac
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

TOLERANCE_SECONDS = 300.0
ID, TIMESTAMP, SIGNATURE = "webhook-id", "webhook-timestamp", "webhook-signature"


def sign(secrets: Sequence[str], message_id: str, at: datetime, body: bytes) -> dict[str, str]:
    """Return the three headers; with several secrets, a signature by each, for while they are rotated."""
    timestamp = str(int(at.timestamp()))
    signed = f"{message_id}.{timestamp}.".encode() + body  # the library signs text only; a body may be bytes
    return {
        ID: message_id,
        TIMESTAMP: timestamp,
        SIGNATURE: " ".join(_signature(secret, signed) for secret in secrets),
    }


def _signature(secret: str, signed: bytes) -> str:
    digest = hmac.digest(b64decode(secret.removeprefix("whsec_")), signed, "sha256")
    return f"v1,{b64encode(digest).decode()}"


def signed_id(headers: Mapping[str, str]) -> str:
    """Return the id that a signature covers, "" without one."""
    return next((value for name, value in headers.items() if name.lower() == ID), "")


def signature_fault(
    secrets: Sequence[str], headers: Mapping[str, str], body: bytes, *, signed_near: datetime | None
) -> str:
    """Say what is wrong with a signature, "" if nothing is.

    It must have been made within five minutes of `signed_near`: when the broker took the message, not now, for
    a command may have waited long.
    """
    given = {name.lower(): value for name, value in headers.items()}
    missing = [name for name in (ID, TIMESTAMP, SIGNATURE) if not given.get(name)]
    if missing:
        return f"no {', '.join(missing)}"
    try:
        at = datetime.fromtimestamp(int(given[TIMESTAMP]), UTC)
        text = body.decode("utf-8")
    except (ValueError, OverflowError, OSError):
        return "an unreadable timestamp or body"
    if signed_near is None or abs((at - signed_near).total_seconds()) > TOLERANCE_SECONDS:
        return "it was not signed within five minutes of being sent"
    from standardwebhooks.webhooks import Webhook  # noqa: PLC0415 - 8 ms of each start that only `listen` needs

    expected = [Webhook(secret).sign(given[ID], at, text) for secret in secrets]
    offered = given[SIGNATURE].split()
    if any(hmac.compare_digest(one.encode(), other.encode()) for one in expected for other in offered):
        return ""
    return "the signature is by none of the known secrets"
