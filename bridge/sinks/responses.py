"""What the HTTP status of a receiver's answer means for a delivery."""

from __future__ import annotations

from bridge.config.registry import FORMATS, format_class
from bridge.errors import DeliveryError, Gone, Misconfigured, Rejected, Unavailable

_LATER = frozenset({408, 425, 429})
_NEVER = frozenset({400, 409, 413, 422, 431})
_GONE = 410
# Of a message that was sent before, it says that the receiver has it.
CONFLICT = 409


def webhook_error(
    status: int, body: bytes = b"", *, is_chat_format: bool = False
) -> type[DeliveryError] | None:
    """Return what a webhook's answer means; None is success.

    A redirect or an unexpected 4xx means a wrong address or wrong credentials: an expired token must not cost events.
    So does 415, because all events of a sink have one content type.

    Args:
        status: of HTTP.
        body: of the answer; some receivers answer 400 if the address or the key is wrong.
        is_chat_format: whether the receiver takes chat messages instead of CloudEvents.
    """
    if 200 <= status < 300:  # noqa: PLR2004 - success
        return None
    if status in _LATER or status >= 500:  # noqa: PLR2004 - errors of the server
        return Unavailable
    if status in _NEVER:
        return Misconfigured if _is_setup_error(body) else Rejected
    # Only receivers of CloudEvents end a subscription by 410; Slack's archived channel may be back any minute.
    return Gone if status == _GONE and not is_chat_format else Misconfigured


def _is_setup_error(body: bytes) -> bool:
    """Ask all formats, because any of them may be sent to any receiver."""
    return any(format_class(name).is_setup_error(body) for name in FORMATS)
