"""Each receiver's refusals and temporary failures, with the statuses and bodies that it really answers with.

Sources: api.slack.com/changelog/2016-05-17-changes-to-errors-for-incoming-webhooks and "Sending messages using
incoming webhooks"; learn.microsoft.com, Power Automate "Cloud flow error code reference"; developer.pagerduty.com,
"Events API v2 overview"; docs.discord.com, "Opcodes and status codes" and "Rate limits"; cloudevents/spec,
http-webhook.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bridge.errors import DeliveryError, Gone, Misconfigured, Rejected, Unavailable
from bridge.sinks.http import webhook_error
from tests.support.inbox import Inbox
from tests.support.process import LIMIT_SECONDS, stored_event, wait_until
from tests.support.webhook import EVENT, failure, running, sink


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    with Inbox() as started:
        yield started


def azure(code: str, message: str = "A long explanation.") -> str:
    return json.dumps({"error": {"code": code, "message": message}})


def discord(code: int, message: str, **more: Any) -> str:
    return json.dumps({"message": message, "code": code, **more})


def pagerduty(*errors: str) -> str:
    return json.dumps({"status": "invalid event", "message": "Event object is invalid", "errors": errors})


WORKFLOW = "7f1c3e0d5b8a4c6f9e2d1a0b3c4d5e6f"
NOT_ENABLED = (
    f"Could not execute workflow '{WORKFLOW}' trigger 'manual' with state 'Disabled': trigger is not enabled."
)
MISMATCH = (
    "The input body for trigger 'manual' of type 'Request' did not match its schema definition. "
    "Error details: 'Invalid type. Expected Object but got Array.'."
)
NO_SCHEME = "The request must have an OAuth authorization scheme."
LIMITED = {"message": "You are being rate limited.", "retry_after": 1.336, "global": False}


class Answer(NamedTuple):
    """What a receiver says, and what that means; None is success."""

    receiver: str
    status: int
    body: str
    kind: type[DeliveryError] | None


ANSWERS = [
    Answer(*answer)
    for answer in (
        ("teams", 202, "", None),
        ("teams", 200, "", None),
        ("teams", 400, azure("WorkflowTriggerIsNotEnabled", NOT_ENABLED), Misconfigured),
        (
            "teams",
            400,
            azure("WorkflowTriggerIsNotEnabled", NOT_ENABLED.replace("Disabled", "Deleted")),
            Misconfigured,
        ),
        ("teams", 400, azure("MissingApiVersionParameter"), Misconfigured),  # the URL was cut at an ampersand
        ("teams", 400, azure("TriggerInputSchemaMismatch", MISMATCH), Rejected),
        ("teams", 400, azure("InvalidRequestContent"), Rejected),
        ("teams", 401, azure("DirectApiAuthorizationRequired", NO_SCHEME), Misconfigured),
        ("teams", 403, azure("AuthorizationFailed"), Misconfigured),
        (
            "teams",
            404,
            azure("WorkflowNotFound", f"The workflow '{WORKFLOW}' could not be found."),
            Misconfigured,
        ),
        ("teams", 404, azure("WorkflowTriggerVersionNotFound"), Misconfigured),
        ("teams", 410, "", Misconfigured),
        ("teams", 413, "", Rejected),
        ("teams", 429, azure("WorkflowRunTooManyRequests"), Unavailable),
        ("teams", 500, azure("InternalServerError"), Unavailable),
        ("teams", 502, azure("NoResponse"), Unavailable),
        ("slack", 200, "ok", None),
        ("slack", 400, "invalid_payload", Rejected),
        ("slack", 400, "invalid_blocks", Rejected),
        ("slack", 400, "no_text", Rejected),
        ("slack", 400, "too_many_attachments", Rejected),
        ("slack", 400, "user_not_found", Misconfigured),
        ("slack", 400, "no_team", Misconfigured),
        ("slack", 400, "channel_not_found\n", Misconfigured),
        ("slack", 403, "action_prohibited", Misconfigured),
        ("slack", 403, "invalid_token", Misconfigured),
        ("slack", 403, "posting_to_general_channel_denied", Misconfigured),
        ("slack", 404, "channel_not_found", Misconfigured),
        ("slack", 404, "no_service", Misconfigured),
        ("slack", 404, "no_active_hooks", Misconfigured),
        ("slack", 404, "no_team", Misconfigured),
        ("slack", 410, "channel_is_archived", Misconfigured),
        ("slack", 429, "rate_limited", Unavailable),
        ("slack", 500, "rollup_error", Unavailable),
        ("slack", 503, "", Unavailable),
        ("discord", 204, "", None),
        ("discord", 200, "ok", None),
        ("discord", 400, discord(50006, "Cannot send an empty message"), Rejected),
        ("discord", 400, discord(50035, "Invalid Form Body", errors={"content": {"_errors": []}}), Rejected),
        (
            "discord",
            400,
            discord(220001, "Webhooks posted to forum channels must have a thread_name"),
            Misconfigured,
        ),
        ("discord", 401, discord(50027, "Invalid Webhook Token"), Misconfigured),
        ("discord", 403, discord(50013, "Missing Permissions"), Misconfigured),
        ("discord", 404, discord(10015, "Unknown Webhook"), Misconfigured),
        ("discord", 429, json.dumps(LIMITED), Unavailable),
        ("discord", 500, discord(0, "500: Internal Server Error"), Unavailable),
        ("discord", 502, "", Unavailable),
        (
            "pagerduty",
            202,
            json.dumps({"status": "success", "message": "Event processed", "dedup_key": "k"}),
            None,
        ),
        ("pagerduty", 400, pagerduty("'payload.severity' is invalid (must be one of critical)"), Rejected),
        (
            "pagerduty",
            400,
            pagerduty("Length of 'routing_key' is incorrect (should be 32 characters)"),
            Misconfigured,
        ),
        (
            "pagerduty",
            400,
            pagerduty("'routing_key' cannot contain non-alphanumeric characters."),
            Misconfigured,
        ),
        ("pagerduty", 400, pagerduty("Invalid routing key"), Misconfigured),
        (
            "pagerduty",
            400,
            pagerduty("'event_action' is missing or blank", "'routing_key' is missing"),
            Misconfigured,
        ),
        ("pagerduty", 403, "", Misconfigured),
        ("pagerduty", 413, "", Rejected),
        ("pagerduty", 429, json.dumps({"status": "throttle exceeded", "message": "Wait"}), Unavailable),
        ("pagerduty", 500, "", Unavailable),
        ("pagerduty", 504, "", Unavailable),
        ("cloudevents", 204, "", None),
        ("cloudevents", 400, "the event has no source", Rejected),
        ("cloudevents", 401, "", Misconfigured),
        ("cloudevents", 403, "", Misconfigured),
        ("cloudevents", 404, "", Misconfigured),
        ("cloudevents", 408, "", Unavailable),
        ("cloudevents", 410, "retired", Gone),
        ("cloudevents", 413, "", Rejected),
        ("cloudevents", 415, "", Misconfigured),
        ("cloudevents", 422, "", Rejected),
        ("cloudevents", 429, "", Unavailable),
        ("cloudevents", 431, "", Rejected),
        ("cloudevents", 503, "", Unavailable),
    )
]
FORMATS = {"discord": "slack"}
EVENTS = [stored_event(number) for number in range(3)]


def _name(answer: Answer) -> str:
    return f"{answer.receiver}-{answer.status}-{answer.body[:60]}"


@pytest.mark.parametrize("answer", ANSWERS, ids=_name)
def test_each_answer_of_a_receiver_has_its_meaning(inbox: Inbox, tmp_path: Path, answer: Answer) -> None:
    target = sink(tmp_path, inbox.url, format=FORMATS.get(answer.receiver, answer.receiver))
    inbox.fault(answer.status, body=answer.body)
    if answer.kind is None:
        target.send([EVENT])
        return
    error = failure(target)
    assert type(error) is answer.kind
    assert (error.status, error.delivered) == (answer.status, 0)
    assert " ".join(answer.body.split()) in str(error)


SETUP = [answer for answer in ANSWERS if answer.kind is Misconfigured and answer.status != 410]


@pytest.mark.parametrize("is_chat_format", [False, True])
@pytest.mark.parametrize("answer", SETUP, ids=_name)
def test_what_is_wrong_with_the_setup_costs_no_event_whatever_the_format(
    answer: Answer, is_chat_format: bool
) -> None:
    error = webhook_error(answer.status, answer.body.encode(), is_chat_format=is_chat_format)
    assert error is Misconfigured


@pytest.mark.parametrize(
    "body",
    [
        "invalid_token_length: the event is too long",
        "unroutable: no queue for the routing key of this event",
        json.dumps({"message": "bad text", "given": '{"code":"WorkflowTriggerIsNotEnabled"}'}),
        pagerduty("'payload.summary' is missing or blank") + "x" * 100_000,
        '"code"' + " " * 100_000,
        '"invalid event"' * 5_000,
        "\xff\x00",
    ],
    ids=lambda body: body[:20],
)
def test_a_word_in_a_refused_event_does_not_make_it_a_configuration_error(body: str) -> None:
    assert webhook_error(400, body.encode("latin-1")) is Rejected


@pytest.mark.parametrize(
    ("format_", "body", "seconds"), [("slack", "rate_limited", 30), ("slack", json.dumps(LIMITED), 65)]
)
def test_a_chat_that_is_sent_too_much_is_left_alone_as_long_as_it_asks(
    inbox: Inbox, tmp_path: Path, format_: str, body: str, seconds: int
) -> None:
    inbox.fault(429, body=body, retry_after=seconds)
    error = failure(sink(tmp_path, inbox.url, format=format_))
    assert (type(error), error.retry_after_seconds) == (Unavailable, seconds)


# --- with an outbox: no event is lost to a wrong setup, none blocks the others ---


@pytest.mark.parametrize(
    ("receiver", "status", "body"),
    [
        ("slack", 410, "channel_is_archived"),
        ("slack", 404, "no_service"),
        ("pagerduty", 400, pagerduty("Invalid routing key")),
        ("teams", 400, azure("WorkflowTriggerIsNotEnabled", NOT_ENABLED)),
        ("cloudevents", 415, ""),
    ],
)
def test_a_receiver_that_is_set_right_gets_every_event_without_a_restart(
    inbox: Inbox, tmp_path: Path, receiver: str, status: int, body: str
) -> None:
    inbox.fault(status, body=body, count=None)
    with running(tmp_path / "state", sink(tmp_path, inbox.url, format=receiver), *EVENTS) as rig:
        wait_until(lambda: rig.dispatcher.status()["state"] == "misconfigured")
        inbox.clear_faults()
        rig.finish()
        assert (len(inbox.accepted), rig.dead()) == (3, [])


def test_a_new_address_is_taken_from_its_file_when_the_old_one_was_revoked(
    inbox: Inbox, tmp_path: Path
) -> None:
    address = tmp_path / "url"
    address.write_text(f"{inbox.base_url}/old")
    inbox.fault(403, body="invalid_token", path="/old", count=None)
    target = sink(tmp_path, "", format="slack", url_file=address)
    with running(tmp_path / "state", target, *EVENTS) as rig:
        inbox.wait_for(lambda: inbox.received, LIMIT_SECONDS)
        address.write_text(f"{inbox.base_url}/new")
        rig.finish()
        assert ([one.path for one in inbox.accepted], rig.dead()) == (["/new"] * 3, [])


def test_a_new_key_is_taken_from_its_file_when_the_old_one_was_revoked(inbox: Inbox, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("0" * 32)
    inbox.fault(400, body=pagerduty("Invalid routing key"), count=None)
    target = sink(tmp_path, inbox.url, format="pagerduty", routing_key_file=key)
    with running(tmp_path / "state", target, *EVENTS) as rig:
        inbox.wait_for(lambda: inbox.received, LIMIT_SECONDS)
        key.write_text("1" * 32)
        rig.dispatcher.begin_drain()
        inbox.wait_for(lambda: b"1" * 32 in inbox.received[-1].body, LIMIT_SECONDS)
        inbox.clear_faults()
        rig.finish()
        assert ([one.json()["routing_key"] for one in inbox.accepted], rig.dead()) == (["1" * 32] * 3, [])


@pytest.mark.parametrize(
    ("receiver", "body"),
    [
        ("slack", "invalid_payload"),
        ("teams", azure("TriggerInputSchemaMismatch", MISMATCH)),
        ("pagerduty", pagerduty("'payload.severity' is invalid")),
        ("cloudevents", "no"),
    ],
)
def test_an_event_that_is_refused_is_dead_lettered_and_blocks_no_other(
    inbox: Inbox, tmp_path: Path, receiver: str, body: str
) -> None:
    inbox.fault(400, body=body)
    with running(tmp_path / "state", sink(tmp_path, inbox.url, format=receiver), *EVENTS) as rig:
        rig.finish()
        assert (len(inbox.accepted), rig.dead()) == (2, [EVENTS[0].id])


def test_only_a_receiver_of_cloudevents_ends_the_sending_by_410(inbox: Inbox, tmp_path: Path) -> None:
    inbox.fault(410)
    with running(tmp_path / "state", sink(tmp_path, inbox.url), *EVENTS) as rig:
        wait_until(lambda: rig.dispatcher.status()["state"] == "gone")
        rig.finish()
        assert (inbox.accepted, rig.dispatcher.status()["backlog"], rig.dead()) == ([], 3, [])
