"""What an HTTP answer of a receiver means for a delivery."""

from __future__ import annotations

import re

from bridge.errors import DeliveryError, Gone, Misconfigured, Rejected, Unavailable
from bridge.events.filters import _GRID_SETUP_MARKS

# Whoever asks for more is asked again after this: a receiver's slip must not silence a sink for days.
RETRY_AFTER_LIMIT_SECONDS = 3600.0

_LATER = frozenset({408, 425, 429})

_NEVER = frozenset({400, 413, 422, 431})

_GONE = 410

_FORBIDDEN = 403

# What receivers answer with 400 although another event would fare no better: it is the setup that is wrong.
_SLACK_SETUP = frozenset(
    b"action_prohibited channel_is_archived channel_not_found invalid_token no_active_hooks no_service no_service_id "
    b"no_team posting_to_general_channel_denied team_disabled user_not_found".split()
)

# Power Automate and Logic Apps; Discord's 220001 wants a thread in the URL.
_SETUP_CODE = re.compile(
    rb'"code"\s*:\s*"?(?:DirectApi\w+|MissingApiVersionParameter|WorkflowNotFound|WorkflowTriggerIsNotEnabled'
    rb"|220001)\b"
)

_PAGERDUTY_REFUSAL, _PAGERDUTY_KEY = b'"invalid event"', re.compile(rb"(?i)routing[ _]key")


def webhook_error(status: int, body: bytes = b"", format_: str = "cloudevents") -> type[DeliveryError] | None:
    """Say what a webhook's answer means; None is success.

    A redirect or an unexpected 4xx means a wrong address or credentials: an expired token must not cost events.
    So does 415, for all events of a sink have one content type.
    """
    if 200 <= status < 300:  # noqa: PLR2004 - the 2xx
        return None
    if status in _LATER or status >= 500:  # noqa: PLR2004 - the 5xx
        return Unavailable
    if status in _NEVER:
        return Misconfigured if _refuses_all(body) else Rejected
    # Only CloudEvents receivers end a subscription by it; Slack's archived channel may be back any minute.
    return Gone if status == _GONE and format_ == "cloudevents" else Misconfigured


def _refuses_all(body: bytes) -> bool:
    """Tell whether an answer is about the address or the key; any format may be sent to any receiver."""
    return bool(
        body.strip() in _SLACK_SETUP
        or _SETUP_CODE.search(body)
        or (_PAGERDUTY_REFUSAL in body and _PAGERDUTY_KEY.search(body))
    )


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
