"""What the answers of receivers mean, what errors say of them, and how batches are parted.

The bodies are those that receivers really answer with. Sources: "Changes to errors for incoming webhooks" of Slack's
changelog; "Cloud flow error code reference" of Power Automate; "Events API v2 overview" of PagerDuty; "Opcodes and
status codes" of Discord; http-webhook.md of cloudevents/spec.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.config.bus import EventGridSettings
from bridge.errors import DeliveryError, Gone, Misconfigured, Rejected, Unavailable
from bridge.events.model import StoredEvent
from bridge.formats.cloudevents import batch as written_batch
from bridge.http.client import Answer
from bridge.sinks.eventgrid import event_grid_error
from bridge.sinks.http import answer_error, post_batches, webhook_error
from tests.support.diff import thorough
from tests.support.process import stored_event

URL = "https://hook.example/secret"


ERRORS: dict[type[DeliveryError] | None, list[int]] = {
    None: [200, 201, 202, 204, 226, 299],
    Unavailable: [408, 425, 429, 500, 502, 503, 504, 507, 599],
    Rejected: [400, 409, 413, 422, 431],
    Gone: [410],
    Misconfigured: [300, 301, 302, 304, 307, 308, 401, 403, 404, 405, 407, 411, 415, 418, 451],
}


@pytest.mark.parametrize("error", ERRORS)
def test_each_status_means_success_or_one_of_four_errors(error: type[DeliveryError] | None) -> None:
    assert [status for status in ERRORS[error] if webhook_error(status) is not error] == []


def test_a_chat_receiver_that_is_gone_may_come_back() -> None:
    assert webhook_error(410, is_chat_format=True) is Misconfigured


# --- receivers ---


def azure(code: str, message: str = "A long explanation.") -> str:
    return json.dumps({"error": {"code": code, "message": message}})


def discord(code: int, message: str) -> str:
    return json.dumps({"message": message, "code": code})


def pagerduty(*errors: str) -> str:
    return json.dumps({"status": "invalid event", "message": "Event object is invalid", "errors": errors})


# What receivers answer with 400 where nothing is wrong with the event ...
SETUP_ERRORS = [
    *("user_not_found", "no_team", "channel_not_found\n", "channel_is_archived", "action_prohibited"),
    *("invalid_token", "no_service", "no_active_hooks", "posting_to_general_channel_denied"),
    azure("WorkflowTriggerIsNotEnabled", "Could not execute workflow '7f1c' trigger 'manual': not enabled."),
    azure("MissingApiVersionParameter"),  # the URL was cut at an ampersand
    azure("DirectApiAuthorizationRequired", "The request must have an OAuth authorization scheme."),
    azure("WorkflowNotFound", "The workflow '7f1c' could not be found."),
    discord(220001, "Webhooks posted to forum channels must have a thread_name"),
    pagerduty("Length of 'routing_key' is incorrect (should be 32 characters)"),
    pagerduty("'routing_key' cannot contain non-alphanumeric characters."),
    pagerduty("Invalid routing key"),
    pagerduty("'event_action' is missing or blank", "'routing_key' is missing"),
]
# ... and where something is, whatever words the event has.
REFUSALS = [
    *("invalid_payload", "invalid_blocks", "no_text", "too_many_attachments", "the event has no source"),
    azure("TriggerInputSchemaMismatch", "The input body for trigger 'manual' did not match its schema."),
    azure("InvalidRequestContent"),
    discord(50006, "Cannot send an empty message"),
    discord(50035, "Invalid Form Body"),
    pagerduty("'payload.severity' is invalid (must be one of critical)"),
    pagerduty("'payload.summary' is missing or blank") + "x" * 100_000,
    "invalid_token_length: the event is too long",
    "unroutable: no queue for the routing key of this event",
    json.dumps({"message": "bad text", "given": '{"code":"WorkflowTriggerIsNotEnabled"}'}),
    '"code"' + " " * 100_000,
    '"invalid event"' * 5_000,
    "\xff\x00",
]


@pytest.mark.parametrize(
    ("expected", "body"),
    [*((Misconfigured, body) for body in SETUP_ERRORS), *((Rejected, body) for body in REFUSALS)],
    ids=lambda given: str(given)[:40],
)
def test_a_refusal_that_means_a_wrong_setup_costs_no_event(expected: type[DeliveryError], body: str) -> None:
    assert webhook_error(400, body.encode("latin-1")) is expected


LARGE = "The maximum size (1048576) has been exceeded."
BOTH = "custom namespace"


@pytest.mark.parametrize(
    ("flavors", "status", "body", "expected"),
    [
        *((BOTH, status, "", None) for status in (200, 202)),
        *((BOTH, status, "", Unavailable) for status in (408, 429, 500, 503, 504)),
        *((BOTH, status, "", Misconfigured) for status in (301, 307, 401, 403, 404, 410, 415)),
        *((BOTH, status, "", Rejected) for status in (400, 413)),
        (BOTH, 400, "UnsupportedApiVersion", Misconfigured),
        (BOTH, 400, "Unknown api version: 2018", Misconfigured),
        ("custom", 400, "This resource is configured for 'EventGridEvent' schema.", Misconfigured),
        ("custom", 400, "This resource is configured for 'CustomInputEvent' schema", Misconfigured),
        ("custom", 400, "This resource is configured for 'CloudEventV10' schema and requires 'id'", Rejected),
        ("custom", 400, "'topic' needs to be just the name of the domain topic. Found: /subs", Misconfigured),
        ("custom", 403, "The quota has been exceeded", Misconfigured),
        ("namespace", 403, "Quota exceeded: the maximum number of events a second", Unavailable),
        ("namespace", 403, "The request was throttled.", Unavailable),
        ("namespace", 403, LARGE, Rejected),
        ("namespace", 403, "The message is too large", Rejected),
    ],
)
def test_each_answer_of_event_grid_has_its_meaning(
    flavors: str, status: int, body: str, expected: type[DeliveryError] | None
) -> None:
    for flavor in flavors.split():
        answer = Answer(status=status, headers={}, body=body.encode())
        assert event_grid_error(flavor, answer) is expected
        later = Unavailable if expected else None
        assert event_grid_error(flavor, replace(answer, headers={"Retry-After": "5"})) is later


GRID = "https://x.westeurope-1.eventgrid.azure.net"
PUBLISH = "/topics/maintenance:publish"


@pytest.mark.parametrize(
    ("path", "settings", "expected"),
    [
        ("/api/events", {}, "/api/events"),
        ("/api/events/", {}, "/api/events"),
        ("/api/events?api-version=2018-01-01", {}, "/api/events"),
        ("", {"flavor": "custom"}, "/api/events"),
        ("/api/events", {"topic": "maintenance"}, "/api/events"),
        ("", {"topic": "maintenance", "flavor": "custom"}, "/api/events"),
        ("", {"topic": "maintenance"}, PUBLISH),
        ("", {"topic": "maintenance", "flavor": "namespace"}, PUBLISH),
        ("/topics/maintenance", {}, PUBLISH),
        (f"{PUBLISH}?api-version=2023-11-01", {}, PUBLISH),
        ("", {}, None),
        ("/elsewhere", {}, None),
        ("", {"flavor": "namespace"}, None),
        ("/api/events", {"flavor": "namespace"}, None),
        ("/api/events", {"topic": "no/topic"}, None),
        ("", {"topic": "no/topic"}, None),
    ],
)
def test_the_kind_of_topic_comes_from_the_endpoint_or_the_settings(
    path: str, settings: dict[str, Any], expected: str | None
) -> None:
    refused = nullcontext() if expected else pytest.raises(ValueError, match="endpoint: given ")
    with refused:
        made = EventGridSettings(kind="eventgrid", endpoint=f"{GRID}{path}", **settings)
        flavor, url = made.publish_url()
        assert url.split("?")[0] == f"{GRID}{expected}"
        assert flavor == ("namespace" if expected == PUBLISH else "custom")


# --- what an error says ---


def error(body: bytes = b"", **headers: str) -> DeliveryError:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return answer_error(Misconfigured, URL, Answer(status=401, headers=named, body=body))


def test_an_error_has_the_first_500_characters_of_the_answer_on_one_line() -> None:
    start, _, excerpt = str(error(b"first\r\n\tsecond \x1b[31mred " + b"x" * 100_000)).partition(": ")
    assert start == "https://hook.example answered 401"
    assert excerpt.startswith("first second [31mred xxx")
    assert len(excerpt) == 500
    assert str(error(b"\xff\xfe\x00bad")).endswith("answered 401: �� bad")


def test_retry_after_is_taken_over_and_bounded() -> None:
    assert [error(Retry_After=text).retry_after_seconds for text in ("17", "999999999")] == [17, 3600]
    assert (error().retry_after_seconds, error().status) == (None, 401)


# --- batches ---


def event_of(number: int, body: bytes) -> StoredEvent:
    return replace(stored_event(number), body=body)


@thorough
@given(
    lengths=st.lists(st.integers(min_value=1, max_value=60), min_size=1, max_size=30),
    max_bytes=st.integers(min_value=2, max_value=130),
)
def test_no_request_is_longer_than_it_may_be_and_none_is_empty(lengths: list[int], max_bytes: int) -> None:
    events = [event_of(number, b"x" * length) for number, length in enumerate(lengths)]
    posted: list[Sequence[StoredEvent]] = []
    post_batches(events, posted.append, max_bytes=max_bytes)
    assert [event for batch in posted for event in batch] == events
    assert all(len(batch) == 1 or len(written_batch(batch)) <= max_bytes for batch in posted)
    assert all(posted)
    for batch, following in pairwise(posted):  # nothing more would have fitted
        assert len(written_batch([*batch, following[0]])) >= max_bytes


@thorough
@given(
    bad=st.sets(st.integers(min_value=0, max_value=19)),
    size=st.integers(min_value=1, max_value=20),
    fails_at=st.integers(min_value=0, max_value=40),
)
def test_what_is_delivered_is_counted_whatever_is_refused_and_when_the_receiver_fails(
    bad: set[int], size: int, fails_at: int
) -> None:
    events = [event_of(number, b"xxxxxxxxxx") for number in range(size)]
    taken: list[StoredEvent] = []
    calls = 0

    def post(batch: Sequence[StoredEvent]) -> None:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise Unavailable("later")
        if any(event.seq in bad for event in batch):
            raise Rejected("no")
        taken.extend(batch)

    dead: list[int] = []
    left = events
    while left:
        try:
            post_batches(left, post, max_bytes=100)
            break
        except DeliveryError as error:
            left = left[error.delivered :]
            if isinstance(error, Rejected):
                dead.append(left[0].seq)
                left = left[1:]
    assert [event.seq for event in taken] == [event.seq for event in events if event.seq not in bad]
    assert dead == sorted(bad & set(range(size)))


@pytest.mark.parametrize(
    ("error", "uncertain"),
    [
        *((Unavailable("no", status=status), 2) for status in (None, 500, 502, 504)),
        *((Unavailable("no", status=status), 0) for status in (408, 425, 429, 503, 507)),
        *((Misconfigured("no", status=status), 0) for status in (302, 401, 404)),
        (Unavailable("no connection", is_unreached=True), 0),
    ],
    ids=str,
)
def test_only_what_was_sent_and_not_clearly_answered_may_have_arrived(
    error: DeliveryError, uncertain: int
) -> None:
    events = [event_of(number, b"xxxxxxxxxx") for number in range(9)]
    posted: list[int] = []

    def post(batch: Sequence[StoredEvent]) -> None:
        posted.append(len(batch))
        if len(posted) == 3:
            raise error

    with pytest.raises(DeliveryError):
        post_batches(events, post, max_bytes=30)
    assert posted == [2, 2, 2]
    assert (error.delivered, error.uncertain) == (4, uncertain)
