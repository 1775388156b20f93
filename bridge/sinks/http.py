"""What the sinks over HTTP share: what an answer means for a delivery, batches, and previews."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence

from bridge.errors import DeliveryError, Gone, Misconfigured, Rejected, Unavailable
from bridge.events.model import StoredEvent
from bridge.http.client import Answer, origin, retry_after_seconds
from bridge.runtime.text import one_line, redact
from bridge.sinks.base import RequestPreview

MAX_BATCH_BYTES = 1_000_000  # Event Grid's documented 1 MB, and a good size for webhooks
# A receiver that asks for more is asked again after this time, so that its mistake does not stop a sink for days.
RETRY_AFTER_LIMIT_SECONDS = 3600.0

_LATER = frozenset({408, 425, 429})
_NEVER = frozenset({400, 409, 413, 422, 431})
_GONE = 410
# Only these, and no answer, leave open whether a receiver has taken what was sent: others may stand in front of it.
_UNCLEAR = frozenset({None, 500, 502, 504})

# What chats answer with 400 if the address or the key is wrong. They are known by their answers alone: any format may
# be sent to any of them.
_SETUP_ERROR = re.compile(
    # Slack: the webhook or its channel takes nothing any more
    rb"\A\s*(?:action_prohibited|channel_is_archived|channel_not_found|invalid_token|no_active_hooks|no_service"
    rb"|no_service_id|no_team|posting_to_general_channel_denied|team_disabled|user_not_found)\s*\Z"
    # Discord: the channel is a forum, so that the URL needs a thread
    rb'|"code"\s*:\s*"?220001\b'
    # Power Automate and Logic Apps, for Teams
    rb'|"code"\s*:\s*"(?:DirectApi\w+|MissingApiVersionParameter|WorkflowNotFound|WorkflowTriggerIsNotEnabled)"'
)


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
    # PagerDuty refuses the routing key.
    is_refused_key = b'"invalid event"' in body and re.search(rb"(?i)routing[ _]key", body) is not None
    return is_refused_key or _SETUP_ERROR.search(body) is not None


def answer_error(kind: type[DeliveryError], url: str, answer: Answer, advice: str = "") -> DeliveryError:
    """Make the error for an answer that is not a success.

    Args:
        kind: what the answer means.
        url: where the request went.
        answer: its status and the start of its body are part of the text.
        advice: the end of the text.
    """
    return kind(
        f"{origin(url)} answered {answer.status}{excerpt(answer.body.decode(errors='replace'))}{advice}",
        status=answer.status,
        retry_after_seconds=retry_after_seconds(answer.headers, limit_seconds=RETRY_AFTER_LIMIT_SECONDS),
    )


def post_batches(
    events: Sequence[StoredEvent], post: Callable[[Sequence[StoredEvent]], None], *, max_bytes: int | None
) -> None:
    """Post events in their order, in as few batches as possible.

    A batch that is rejected is posted again in halves, until the rejected event is alone; a digest is not.

    Args:
        events: at least one.
        post: posts one batch.
        max_bytes: the size of a batch, unless a single event is larger; None posts all as one digest.

    Raises:
        DeliveryError: with the number of events that were accepted before, and of those that may have been.
    """
    delivered = 0
    waiting = _batches(events, max_bytes)[::-1] if max_bytes else [events]
    while waiting:
        batch = waiting.pop()
        try:
            post(batch)
        except DeliveryError as error:
            if not isinstance(error, Rejected) or len(batch) == 1 or max_bytes is None:
                error.delivered = delivered
                error.uncertain = len(batch) if error.status in _UNCLEAR and not error.is_unreached else 0
                raise
            half = len(batch) // 2
            waiting += [batch[half:], batch[:half]]
        else:
            delivered += len(batch)


def _batches(events: Sequence[StoredEvent], max_bytes: int) -> list[Sequence[StoredEvent]]:
    batches: list[Sequence[StoredEvent]] = []
    start, size = 0, 2
    for number, event in enumerate(events):
        size += len(event.body) + 1
        if size > max_bytes and number > start:
            batches.append(events[start:number])
            start, size = number, len(event.body) + 3
    return [*batches, events[start:]]


def preview(
    method: str, url: str, headers: Mapping[str, str], body: bytes, *, keep: Collection[str] = ()
) -> RequestPreview:
    """Describe a request without its secrets, of which the URL's path may be one.

    Args:
        method: of HTTP.
        url: of which only the origin is shown.
        headers: their values are shown as far as they are not secret.
        body: likewise.
        keep: secrets that the body cannot hold; text that equals one is shown.
    """
    head = [f"{method} {origin(url)}/...", *(f"{name}: {redact(value)}" for name, value in headers.items())]
    return RequestPreview(head=tuple(head), body=redact(body.decode(), keep=keep).encode())


def excerpt(text: str) -> str:
    """Return the start of a text as the end of an error, "" if there is nothing to read."""
    return f": {line}" if (line := one_line(text)) else ""
