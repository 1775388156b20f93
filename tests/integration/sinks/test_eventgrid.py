"""The Event Grid sink against the lab: what arrives, who it is, what each refusal means, and what is kept secret."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from bridge.config.bus import EventGridSettings
from bridge.errors import Misconfigured, Rejected, Unavailable
from bridge.events.model import StoredEvent
from bridge.lab import eventgrid as rules
from bridge.sinks.eventgrid import EventGridSink
from bridge.sinks.http import MAX_BATCH_BYTES
from tests.support.eventgrid import EventGridLab
from tests.support.npm import node_modules, run_script
from tests.support.only import only
from tests.support.paths import DATA
from tests.support.process import stored_event
from tests.support.settings import read_settings
from tests.support.sinks import TOKEN, TokenEndpoint, failure

FLAVORS = {"custom": rules.CUSTOM, "namespace": rules.NAMESPACE}
TOPIC = "maintenance"
READER = DATA / "eventgrid" / "read_events.js"
EVENT = stored_event(1, Description='100% "quoted" €')

Make = Callable[..., EventGridSink]


@pytest.fixture(params=FLAVORS)
def flavor(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def grid() -> Iterator[EventGridLab]:
    with EventGridLab(topics=[TOPIC]) as started:
        yield started
        assert started.leaked == []


@pytest.fixture
def imds(monkeypatch: pytest.MonkeyPatch, grid: EventGridLab) -> Iterator[TokenEndpoint]:
    """Return where the identity's token comes from, which the lab accepts."""
    grid.require_token(TOKEN)
    with TokenEndpoint() as started:
        monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", started.url)
        yield started


@pytest.fixture
def make(grid: EventGridLab, tmp_path: Path) -> Iterator[Make]:
    """Make sinks as the command does, with the lab's first key unless `key` says otherwise; None is the identity."""
    with ExitStack() as stack:

        def make(flavor: str = "custom", *, key: str | None = grid.keys[0], **settings: Any) -> EventGridSink:
            if key:
                settings["key_file"] = tmp_path / "key"
                settings["key_file"].write_text(key)
            endpoint = grid.custom_endpoint if flavor == "custom" else grid.namespace_endpoint(TOPIC)
            read = read_settings(tmp_path, kind="eventgrid", **{"endpoint": endpoint, **settings})
            assert isinstance(read, EventGridSettings)
            return stack.enter_context(closing(EventGridSink(read)))

        yield make


def events(count: int, *, size: int = 0) -> list[StoredEvent]:
    return [stored_event(number, Number=number, Filling="x" * size) for number in range(count)]


def statuses(grid: EventGridLab) -> list[int]:
    return [one.status for one in grid.received]


# --- what arrives ---


def test_a_batch_arrives_byte_by_byte_with_the_key(grid: EventGridLab, make: Make, flavor: str) -> None:
    two = events(2)
    make(flavor).send(two)
    one, key = only(grid.accepted), grid.keys[0]
    where, header, secret = {
        "custom": ("/api/events?api-version=2018-01-01", "aeg-sas-key", key),
        "namespace": (
            f"/topics/{TOPIC}:publish?api-version=2024-06-01",
            "authorization",
            f"SharedAccessKey {key}",
        ),
    }[flavor]
    assert (f"{one.path}?{one.query}", one.headers[header]) == (where, secret)
    assert one.headers["content-type"] == "application/cloudevents-batch+json; charset=utf-8"
    assert one.body == b"[" + two[0].body + b"," + two[1].body + b"]"


@pytest.mark.timeout(600)  # npm installs the package
def test_npms_cloudevents_reads_what_was_published(grid: EventGridLab, make: Make) -> None:
    modules = node_modules("cloudevents")
    sent = [EVENT, *events(1)]
    for flavor in FLAVORS:
        make(flavor).send(sent)
    given = [{"headers": dict(one.headers), "body": one.body.decode()} for one in grid.accepted]
    read = run_script(READER, modules=modules, given=given)
    assert read == [one.envelope for one in sent] * 2


def test_a_domain_gets_its_topic_as_the_source_and_without_one_says_what_to_set(make: Make) -> None:
    with EventGridLab(is_domain=True) as domain:
        target = make(endpoint=domain.custom_endpoint, key=domain.keys[0])
        error = failure(target, *events(2))
        assert (type(error), error.status, error.delivered) == (Misconfigured, 400, 0)
        assert str(error).endswith("; set `topic` to the name of one of the domain's topics")
        target = make(endpoint=domain.custom_endpoint, key=domain.keys[0], topic=TOPIC)
        target.send(events(2))
        assert domain.events() == [{**one.envelope, "source": TOPIC} for one in events(2)]
        assert target.preview(events(1)[0]).body == target._batch(events(1))


# --- batches ---


def test_a_batch_holds_as_many_events_as_the_flavor_takes(
    grid: EventGridLab, make: Make, flavor: str
) -> None:
    limit = FLAVORS[flavor].max_events
    target = make(flavor)
    assert target.max_batch == limit
    target.send(events(limit))
    assert [event["data"]["Number"] for event in grid.events()] == list(range(limit))
    assert len(grid.accepted[0].body) <= MAX_BATCH_BYTES < rules.MAX_BODY_BYTES


def test_an_event_too_large_alone_is_rejected(grid: EventGridLab, make: Make, flavor: str) -> None:
    large = stored_event(9, Filling="x" * rules.MAX_BODY_BYTES)
    target = make(flavor)
    error = failure(target, *events(2), large, *events(1))
    assert (type(error), error.delivered) == (Rejected, 2)
    assert error.status == {"custom": 413, "namespace": 403}[flavor]
    assert grid.events() == [one.envelope for one in events(2)]


def test_a_namespace_need_not_say_that_it_is_too_large(grid: EventGridLab, make: Make) -> None:
    grid.fault(403, count=2, body="Forbidden")
    large = stored_event(9, Filling="x" * MAX_BATCH_BYTES)
    assert [type(failure(make("namespace"), one)) for one in (EVENT, large)] == [Misconfigured, Rejected]


def test_a_key_that_cannot_be_read_is_not_replaced_by_the_identity(make: Make, tmp_path: Path) -> None:
    settings = make()._settings
    (tmp_path / "key").unlink()
    with pytest.raises(OSError, match="No such file"):
        EventGridSink(settings)


# --- the identity ---


@pytest.mark.parametrize("expires_in", [200, 86400])
def test_a_token_is_renewed_before_it_expires_and_a_revoked_one_at_the_reload(
    grid: EventGridLab, make: Make, imds: TokenEndpoint, expires_in: int
) -> None:
    imds.expires_in = expires_in  # the library asks again when less than five minutes are left
    target = make(key=None)
    target.send([EVENT])
    imds.token = "the-next-token"  # noqa: S105 - a test's
    grid.require_token(imds.token)
    if expires_in > 300:
        assert type(failure(target)) is Misconfigured
        target.reload()
    target.send([EVENT])
    assert statuses(grid) == ([200, 401, 200] if expires_in > 300 else [200, 200])


@pytest.mark.usefixtures("imds")
def test_an_identity_without_the_role_is_a_fault_of_the_setup(grid: EventGridLab, make: Make) -> None:
    grid.require_token(TOKEN, permitted=False)
    target = make(key=None)
    error = failure(target)
    assert (type(error), error.status) == (Misconfigured, 401)
    assert "does not have permission to send data" in str(error)
    assert len(grid.received) == 1  # the same token again would change nothing
    with pytest.raises(Misconfigured, match="does not have permission"):
        target.check()
    grid.require_token(TOKEN)
    target.reload()
    target.send([EVENT])
    assert grid.events() == [EVENT.envelope]


def test_a_workload_identity_that_is_set_up_by_half_is_reported(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "AZURE_TENANT_ID": "t",
        "AZURE_FEDERATED_TOKEN_FILE": str(tmp_path / "missing"),
        "AZURE_AUTHORITY_HOST": "https://127.0.0.1:9/",
    }.items():
        monkeypatch.setenv(name, value)
    for client_id in ("", "c-1"):
        monkeypatch.setenv("AZURE_CLIENT_ID", client_id)
        assert type(failure(make(key=None))) is Misconfigured


# --- secrets ---


@pytest.mark.usefixtures("imds")
def test_a_token_that_the_service_repeats_is_not_shown(
    grid: EventGridLab, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    target = make(key=None)
    for status in (400, 401, 503):
        grid.fault(status, count=2, body=f'{{"you": "sent {TOKEN}", "as": "Bearer {TOKEN}"}}')
        error = failure(target)
        grid.clear_faults()
        assert f"answered {status}" in str(error)
        assert TOKEN not in f"{error}{error.__cause__}{caplog.text}"


# --- check and show ---


def test_a_check_needs_the_topic_and_the_right_to_send(grid: EventGridLab, make: Make, flavor: str) -> None:
    target = make(flavor)
    assert target.check() == f"{grid.base_url}: ready to send, it answered 400 to an empty batch"
    for status, kind in ((401, Misconfigured), (404, Misconfigured), (503, Unavailable)):
        grid.fault(status, count=None)
        with pytest.raises(kind, match=f"answered {status}"):
            target.check()
        grid.clear_faults()
    assert grid.events() == []


@pytest.mark.parametrize("has_key", [True, False])
def test_a_request_is_shown_with_the_header_that_would_be_sent_and_without_its_secret(
    grid: EventGridLab, make: Make, flavor: str, imds: TokenEndpoint, has_key: bool
) -> None:
    shown = make(flavor, key=grid.keys[0] if has_key else None).preview(EVENT)
    name = "aeg-sas-key" if has_key and flavor == "custom" else "Authorization"
    assert shown.head == (
        f"POST {grid.base_url}/...",
        "Content-Type: application/cloudevents-batch+json; charset=utf-8",
        f"{name}: ***",
    )
    assert shown.body == b"[" + EVENT.body + b"]"
    assert (grid.received, imds.requests) == ([], [])
