"""What the HTTP status of a receiver's answer means for a delivery."""

from __future__ import annotations

import re

from bridge.errors import DeliveryError, Gone, Misconfigured, Rejected, Unavailable

_LATER = frozenset({408, 425, 429})
_NEVER = frozenset({400, 409, 413, 422, 431})
_GONE = 410
# Of a message that was sent before, it says that the receiver has it.
CONFLICT = 409

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
