"""Decide about deliveries: which events a sink takes, and what an HTTP status means for one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from bridge.errors import DeliveryError, Gone, Misconfigured, Rejected, Unavailable
from bridge.imds.document import Json, StoredEvent, is_among, names

RETRY_BASE_SECONDS = 0.5
RETRY_LIMIT_SECONDS = 60.0
# Whoever asks for more is asked again after this: a receiver's slip must not silence a sink for days.
RETRY_AFTER_LIMIT_SECONDS = 3600.0

_LATER = frozenset({408, 425, 429})
_NEVER = frozenset({400, 413, 422, 431})
_GONE = 410
_FORBIDDEN = 403


class Filter:
    """Which events a sink takes: `types` with `*`, and `where`, equality with attributes or data.

    A name in `where` is looked for among the attributes first, then in `data`; dots lead into objects. Where
    the event holds a list, one equal element is enough. `scope` "self" takes what names this VM, and what names
    none or where it is unknown who this VM is; "first" what names it first.
    """

    def __init__(
        self, *, types: Sequence[str] = ("*",), where: Mapping[str, Json] | None = None, scope: str = "all"
    ) -> None:
        patterns = (".*".join(map(re.escape, pattern.split("*"))) for pattern in types)
        self._types = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
        self._where = {
            name: tuple(wanted) if isinstance(wanted, list | tuple) else (wanted,)
            for name, wanted in (where or {}).items()
        }
        self._scope = scope

    def takes(self, event: StoredEvent) -> bool:
        """Tell whether the sink wants an event."""
        if not self.takes_type(event.type):
            return False
        return (not self._where or self._matches(event.envelope)) and (
            self._scope == "all"
            or "reporter" in event.envelope  # nobody else tells of the VM's own events and receipts
            or _concerns(event.envelope.get("data"), first=self._scope == "first")
        )

    def takes_type(self, event_type: str) -> bool:
        """Tell whether the sink wants events of this type at all."""
        return self._types.fullmatch(event_type) is not None

    def _matches(self, envelope: Mapping[str, Json]) -> bool:
        return all(_equals_one(_look_up(envelope, name), wanted) for name, wanted in self._where.items())


def _concerns(data: Json, *, first: bool) -> bool:
    """Tell whether an event is about this VM; what may be counts as being."""
    told = data if isinstance(data, dict) else {}
    vm = told.get("Vm")
    who = vm if isinstance(vm, dict) else {}
    resources = names(told.get("Resources"))
    if not resources or not who.get("VmId"):  # without an id, the name is only that of the host
        return True
    return is_among(str(who.get("Name")), resources[:1] if first else resources)


def _look_up(envelope: Mapping[str, Json], name: str) -> Json:
    if name != "data" and name in envelope:
        return envelope[name]
    value: Json = envelope.get("data")
    for step in name.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    return value


def _equals_one(found: Json, wanted: Sequence[Json]) -> bool:
    candidates = found if isinstance(found, list) else [found]
    # A bool equals 0 or 1 in Python, but not in JSON.
    return any(
        candidate == value and isinstance(candidate, bool) == isinstance(value, bool)
        for candidate in candidates
        for value in wanted
    )


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


# What Event Grid answers with 400 where the topic is set up for other events, or the address is wrong.
_GRID_SETUP_MARKS = (b"'EventGridEvent'", b"'CustomInputEvent'", b"UnsupportedApiVersion", b"api version")


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
