"""What an HTTP answer of a receiver means for a delivery."""

from __future__ import annotations

from bridge.config.registry import FORMATS, format_class
from bridge.errors import DeliveryError, Gone, Misconfigured, Rejected, Unavailable

# Whoever asks for more is asked again after this: a receiver's slip must not silence a sink for days.
RETRY_AFTER_LIMIT_SECONDS = 3600.0

_LATER = frozenset({408, 425, 429})

_NEVER = frozenset({400, 413, 422, 431})

_GONE = 410

_FORBIDDEN = 403

# What Event Grid answers with 400 where the topic is set up for other events, or the address is wrong.
_GRID_SETUP_MARKS = (b"'EventGridEvent'", b"'CustomInputEvent'", b"UnsupportedApiVersion", b"api version")


def webhook_error(
    status: int, body: bytes = b"", *, is_chat_format: bool = False
) -> type[DeliveryError] | None:
    """Say what a webhook's answer means; None is success.

    A redirect or an unexpected 4xx means a wrong address or credentials: an expired token must not cost events.
    So does 415, for all events of a sink have one content type.
    """
    if 200 <= status < 300:  # noqa: PLR2004 - the 2xx
        return None
    if status in _LATER or status >= 500:  # noqa: PLR2004 - the 5xx
        return Unavailable
    if status in _NEVER:
        return Misconfigured if _is_setup_error(body) else Rejected
    # Only receivers of CloudEvents end a subscription by 410; Slack's archived channel may be back any minute.
    return Gone if status == _GONE and not is_chat_format else Misconfigured


def _is_setup_error(body: bytes) -> bool:
    """Ask all formats, for any of them may be sent to any receiver."""
    return any(format_class(name).is_setup_error(body) for name in FORMATS)


def event_grid_error(
    flavor: str, status: int, body: bytes = b"", *, asks_to_wait: bool = False, oversized: bool = False
) -> type[DeliveryError] | None:
    """Say what Event Grid's answer means; None is success.

    A topic that is missing (404, or 410 of a namespace) may be created: unlike a webhook's 410, it is waited for.
    A namespace answers 403 for want of a role, but also to what is too large and when its quota is used up.
    Its words tell them apart, as far as it finds any, and whether the request was `oversized`. With `Retry-After`
    (`asks_to_wait`) whatever is refused may be taken later.
    """
    error = webhook_error(status)
    if error and asks_to_wait:
        return Unavailable
    if status == _FORBIDDEN and flavor == "namespace":
        if oversized:
            return Rejected
        told = body.lower()
        if b"quota" in told or b"throttl" in told:
            return Unavailable
        return Rejected if b"maximum" in told or b"too large" in told else Misconfigured
    is_setup = any(mark in body for mark in _GRID_SETUP_MARKS)
    return Misconfigured if error is Gone or (error is Rejected and is_setup) else error
