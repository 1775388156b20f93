"""The duties of an IMDS client: of the real one with the simulator, and of the double."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from bridge.config.models import ImdsSettings
from bridge.errors import ImdsError
from bridge.imds.client import ImdsClient
from bridge.lab.imds import COMPUTE_PATH, EVENTS_PATH
from tests.support.clock import MovedClock
from tests.support.diff import FIRST, SECOND, entry
from tests.support.imds import ImdsDouble
from tests.support.imds_lab import ImdsLab

DOCUMENT = {"DocumentIncarnation": 5, "Events": [entry(FIRST), entry(SECOND)]}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A client and what IMDS does; `fail` makes the next call of a method fail with a status."""

    imds: ImdsClient | ImdsDouble
    serve: Callable[[dict[str, Any] | bytes], None]
    fail: Callable[..., None]
    approved: Callable[[], list[str]]


def double() -> Case:
    imds = ImdsDouble()

    def fail(method: str, status: int, retry_after: int | None = None) -> None:
        error = ImdsError(f"IMDS answered {status}", status=status, retry_after_seconds=retry_after)
        imds.fail(error, methods=[method], count=1)

    return Case(imds=imds, serve=imds.serve, fail=fail, approved=lambda: imds.approved)


def client(lab: ImdsLab) -> Case:
    def fail(method: str, status: int, retry_after: int | None = None) -> None:
        path = COMPUTE_PATH if method == "instance" else EVENTS_PATH
        verb = "POST" if method == "approve" else "GET"
        lab.fault(status, count=1, retry_after=retry_after, method=verb, path=path)

    return Case(
        imds=ImdsClient(ImdsSettings(endpoint=lab.url("web-0")), clock=MovedClock()),
        serve=lab.serve_document,
        fail=fail,
        approved=lambda: [approval.event_id for approval in lab.approvals],
    )


@pytest.fixture(params=["client", "double"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    made = double() if request.param == "double" else client(request.getfixturevalue("imds"))
    yield made
    made.imds.close()


def call(imds: ImdsClient | ImdsDouble, method: str) -> None:
    """Call a method by its name."""
    if method == "approve":
        imds.approve([FIRST], incarnation=5)
    elif method == "instance":
        imds.instance()
    else:
        imds.document()


def test_the_document_is_returned_as_received(case: Case) -> None:
    case.serve(DOCUMENT)
    assert json.loads(case.imds.document()) == DOCUMENT


@pytest.mark.parametrize("body", [b"", b"no JSON", b"\xef\xbb\xbf{}"])
def test_a_body_is_not_checked(case: Case, body: bytes) -> None:
    case.serve(body)
    assert case.imds.document(timeout_seconds=5) == body


def test_instance_data_names_the_vm(case: Case) -> None:
    vm = case.imds.instance()
    assert vm.name == "web-0"
    assert vm.vm_id


def test_approvals_reach_imds_with_the_ids_as_given(case: Case) -> None:
    case.serve(DOCUMENT)
    case.imds.approve([FIRST, SECOND.lower()], incarnation=5)
    case.imds.approve([FIRST], incarnation=5)
    assert case.approved() == [FIRST, SECOND.lower(), FIRST]


@pytest.mark.parametrize("method", ["document", "instance", "approve"])
@pytest.mark.parametrize(("status", "retry_after"), [(400, None), (429, None), (429, 3), (503, None)])
def test_a_refusal_carries_its_status_and_retry_after_and_the_next_call_succeeds(
    case: Case, method: str, status: int, retry_after: int | None
) -> None:
    case.serve(DOCUMENT)
    case.fail(method, status, retry_after=retry_after)
    with pytest.raises(ImdsError) as raised:
        call(case.imds, method)
    assert (raised.value.status, raised.value.retry_after_seconds) == (status, retry_after)
    assert case.approved() == []
    call(case.imds, method)


def test_a_call_after_close_opens_a_new_connection(case: Case) -> None:
    case.imds.document()
    assert case.imds.base.startswith("http://")
    case.imds.close()
    case.imds.close()
    case.imds.document()
