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
from typing import Any

import pytest

from bridge.errors import DeliveryError, Gone, Misconfigured, Rejected, Unavailable
from bridge.sinks.http import webhook_error
from tests.support.delivery import running
from tests.support.inbox import Inbox
from tests.support.process import LIMIT_SECONDS, stored_event, wait_until
from tests.support.webhook import MakeWebhook


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


# What a receiver says besides what its status alone says, and what that means. No body of success is an error.
ANSWERS: dict[str, dict[type[DeliveryError], list[tuple[int, str]]]] = {
    "teams": {
        Misconfigured: [
            (400, azure("WorkflowTriggerIsNotEnabled", NOT_ENABLED)),
            (400, azure("WorkflowTriggerIsNotEnabled", NOT_ENABLED.replace("Disabled", "Deleted"))),
            (400, azure("MissingApiVersionParameter")),  # the URL was cut at an ampersand
            (401, azure("DirectApiAuthorizationRequired", NO_SCHEME)),
            (403, azure("AuthorizationFailed")),
            (404, azure("WorkflowNotFound", f"The workflow '{WORKFLOW}' could not be found.")),
            (404, azure("WorkflowTriggerVersionNotFound")),
        ],
        Rejected: [
            (400, azure("TriggerInputSchemaMismatch", MISMATCH)),
            (400, azure("InvalidRequestContent")),
        ],
        Unavailable: [
            (429, azure("WorkflowRunTooManyRequests")),
            (500, azure("InternalServerError")),
            (502, azure("NoResponse")),
        ],
    },
    "slack": {
        Misconfigured: [
            *((400, body) for body in ("user_not_found", "no_team", "channel_not_found\n")),
            *(
                (403, body)
                for body in ("action_prohibited", "invalid_token", "posting_to_general_channel_denied")
            ),
            *((404, body) for body in ("channel_not_found", "no_service", "no_active_hooks", "no_team")),
        ],
        Rejected: [
            (400, body) for body in ("invalid_payload", "invalid_blocks", "no_text", "too_many_attachments")
        ],
        Unavailable: [(429, "rate_limited"), (500, "rollup_error")],
    },
    "discord": {
        Misconfigured: [
            (400, discord(220001, "Webhooks posted to forum channels must have a thread_name")),
            (401, discord(50027, "Invalid Webhook Token")),
            (403, discord(50013, "Missing Permissions")),
            (404, discord(10015, "Unknown Webhook")),
        ],
        Rejected: [
            (400, discord(50006, "Cannot send an empty message")),
            (400, discord(50035, "Invalid Form Body", errors={"content": {"_errors": []}})),
        ],
        Unavailable: [(429, json.dumps(LIMITED)), (500, discord(0, "500: Internal Server Error"))],
    },
    "pagerduty": {
        Misconfigured: [
            (400, pagerduty("Length of 'routing_key' is incorrect (should be 32 characters)")),
            (400, pagerduty("'routing_key' cannot contain non-alphanumeric characters.")),
            (400, pagerduty("Invalid routing key")),
            (400, pagerduty("'event_action' is missing or blank", "'routing_key' is missing")),
        ],
        Rejected: [(400, pagerduty("'payload.severity' is invalid (must be one of critical)"))],
        Unavailable: [(429, json.dumps({"status": "throttle exceeded", "message": "Wait"}))],
    },
    "cloudevents": {Rejected: [(400, "the event has no source")], Gone: [(410, "retired")]},
}
EVENTS = [stored_event(number) for number in range(3)]


@pytest.mark.parametrize(
    ("receiver", "expected", "status", "body"),
    [
        pytest.param(receiver, expected, status, body, id=f"{receiver}-{status}-{body[:60]}")
        for receiver, meanings in ANSWERS.items()
        for expected, answers in meanings.items()
        for status, body in answers
    ],
)
def test_each_answer_of_a_receiver_has_its_meaning_and_a_wrong_setup_is_one_in_any_format(
    receiver: str, expected: type[DeliveryError], status: int, body: str
) -> None:
    is_chat_format = receiver != "cloudevents"
    assert webhook_error(status, body.encode(), is_chat_format=is_chat_format) is expected
    if expected is Misconfigured:
        assert webhook_error(status, body.encode()) is expected


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


# --- with an outbox: no event is lost to a wrong setup, none blocks the others ---


@pytest.mark.parametrize(
    ("receiver", "answer"),
    [
        ("slack", (410, "channel_is_archived")),
        ("pagerduty", (400, pagerduty("Invalid routing key"))),
        ("teams", (400, azure("WorkflowTriggerIsNotEnabled", NOT_ENABLED))),
        ("cloudevents", (415, "")),
    ],
)
def test_a_receiver_that_is_set_right_gets_every_event_without_a_restart(
    inbox: Inbox, webhook: MakeWebhook, tmp_path: Path, receiver: str, answer: tuple[int, str]
) -> None:
    inbox.fault(answer[0], body=answer[1], count=None)
    with running(tmp_path / "state", webhook(format=receiver), *EVENTS) as rig:
        wait_until(lambda: rig.status("state") == "misconfigured")
        inbox.clear_faults()
        rig.finish()
        assert (len(inbox.accepted), rig.dead()) == (3, [])


def test_a_new_address_is_taken_from_its_file_when_the_old_one_was_revoked(
    inbox: Inbox, webhook: MakeWebhook, tmp_path: Path
) -> None:
    address = tmp_path / "url"
    address.write_text(f"{inbox.base_url}/old")
    inbox.fault(403, body="invalid_token", path="/old", count=None)
    target = webhook(format="slack", url_file=address)
    with running(tmp_path / "state", target, *EVENTS) as rig:
        inbox.wait_for(lambda: inbox.received, LIMIT_SECONDS)
        address.write_text(f"{inbox.base_url}/new")
        rig.finish()
        assert ([one.path for one in inbox.accepted], rig.dead()) == (["/new"] * 3, [])


def test_a_new_key_is_taken_from_its_file_when_the_old_one_was_revoked(
    inbox: Inbox, webhook: MakeWebhook, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("0" * 32)
    inbox.fault(400, body=pagerduty("Invalid routing key"), count=None)
    target = webhook(format="pagerduty", routing_key_file=key)
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
    inbox: Inbox, webhook: MakeWebhook, tmp_path: Path, receiver: str, body: str
) -> None:
    inbox.fault(400, body=body)
    with running(tmp_path / "state", webhook(format=receiver), *EVENTS) as rig:
        rig.finish()
        assert (len(inbox.accepted), rig.dead()) == (2, [EVENTS[0].id])


def test_only_a_receiver_of_cloudevents_ends_the_sending_by_410(
    inbox: Inbox, webhook: MakeWebhook, tmp_path: Path
) -> None:
    inbox.fault(410)
    with running(tmp_path / "state", webhook(), *EVENTS) as rig:
        wait_until(lambda: rig.status("state") == "gone")
        rig.finish()
        assert (inbox.accepted, rig.backlog(), rig.dead()) == ([], 3, [])
