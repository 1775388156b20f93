"""Standard Webhooks signatures: made for what goes out, checked on commands that come in.

The standard's own package signs text only and compares the time of signing with now. Here a body may be bytes (binary
mode), and a command may have waited for long.
"""

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
    signatures = (_signature(secret, message_id, timestamp, body) for secret in secrets)
    return {ID: message_id, TIMESTAMP: timestamp, SIGNATURE: " ".join(signatures)}


def _signature(secret: str, message_id: str, timestamp: str, body: bytes) -> str:
    key, signed = b64decode(secret.removeprefix("whsec_")), f"{message_id}.{timestamp}.".encode() + body
    return f"v1,{b64encode(hmac.digest(key, signed, 'sha256')).decode()}"


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
    except (ValueError, OverflowError, OSError):
        return "an unreadable timestamp"
    if signed_near is None or abs((at - signed_near).total_seconds()) > TOLERANCE_SECONDS:
        return "it was not signed within five minutes of being sent"
    expected = [_signature(secret, given[ID], given[TIMESTAMP], body) for secret in secrets]
    offered = given[SIGNATURE].split()
    if any(hmac.compare_digest(one.encode(), other.encode()) for one in expected for other in offered):
        return ""
    return "the signature is by none of the known secrets"
