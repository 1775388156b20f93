"""The duties of an IMDS client: of the real one with the simulator, and of the double."""

from __future__ import annotations

import json
from collections.abc import Iterator
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


class DoubleRig:
    """The double."""

    def __init__(self) -> None:
        self.imds = self._double = ImdsDouble()

    def serve(self, document: dict[str, Any] | bytes) -> None:
        self._double.serve(document)

    def fail(self, method: str, status: int, *, retry_after: int | None = None) -> None:
        error = ImdsError(f"IMDS answered {status}", status=status, retry_after_seconds=retry_after)
        self._double.fail(error, methods=[method], count=1)

    def approved(self) -> list[str]:
        return self._double.approved


class ClientRig:
    """The real client with the simulator."""

    def __init__(self, lab: ImdsLab) -> None:
        self._lab = lab
        self.imds = ImdsClient(ImdsSettings(endpoint=lab.url("web-0")), clock=MovedClock(), environ={})

    def serve(self, document: dict[str, Any] | bytes) -> None:
        self._lab.serve_document(document)

    def fail(self, method: str, status: int, *, retry_after: int | None = None) -> None:
        path = COMPUTE_PATH if method == "instance" else EVENTS_PATH
        verb = "POST" if method == "approve" else "GET"
        self._lab.fault(status, count=1, retry_after=retry_after, method=verb, path=path)

    def approved(self) -> list[str]:
        return [approval.event_id for approval in self._lab.approvals]


Rig = ClientRig | DoubleRig


@pytest.fixture(params=["client", "double"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    if request.param == "double":
        yield DoubleRig()
        return
    with ImdsLab(rate_limit=None) as lab:
        client = ClientRig(lab)
        yield client
        client.imds.close()


def call(imds: ImdsClient, method: str) -> None:
    """Call a method by its name."""
    if method == "approve":
        imds.approve([FIRST], incarnation=5)
    elif method == "instance":
        imds.instance()
    else:
        imds.document()


def test_the_document_is_returned_as_received(rig: Rig) -> None:
    rig.serve(DOCUMENT)
    assert json.loads(rig.imds.document()) == DOCUMENT


@pytest.mark.parametrize("body", [b"", b"no JSON", b"\xef\xbb\xbf{}"])
def test_a_body_is_not_checked(rig: Rig, body: bytes) -> None:
    rig.serve(body)
    assert rig.imds.document(timeout_seconds=5) == body


def test_instance_data_names_the_vm(rig: Rig) -> None:
    vm = rig.imds.instance()
    assert vm.name == "web-0"
    assert vm.vm_id


def test_approvals_reach_imds_with_the_ids_as_given(rig: Rig) -> None:
    rig.serve(DOCUMENT)
    rig.imds.approve([FIRST, SECOND.lower()], incarnation=5)
    rig.imds.approve([FIRST], incarnation=5)
    assert rig.approved() == [FIRST, SECOND.lower(), FIRST]


@pytest.mark.parametrize("method", ["document", "instance", "approve"])
@pytest.mark.parametrize("status", [400, 404, 410, 429, 500, 503])
def test_a_refusal_carries_its_status_and_the_next_call_succeeds(rig: Rig, method: str, status: int) -> None:
    rig.serve(DOCUMENT)
    rig.fail(method, status)
    with pytest.raises(ImdsError) as raised:
        call(rig.imds, method)
    assert raised.value.status == status
    assert raised.value.retry_after_seconds is None
    assert rig.approved() == []
    call(rig.imds, method)


def test_a_refusal_carries_its_retry_after(rig: Rig) -> None:
    rig.fail("document", 429, retry_after=3)
    with pytest.raises(ImdsError) as raised:
        rig.imds.document()
    assert raised.value.retry_after_seconds == 3


def test_a_failing_method_leaves_the_others_alone(rig: Rig) -> None:
    rig.fail("instance", 500)
    rig.imds.document()
    with pytest.raises(ImdsError):
        rig.imds.instance()


def test_a_call_after_close_opens_a_new_connection(rig: Rig) -> None:
    rig.imds.document()
    assert rig.imds.base.startswith("http://")
    rig.imds.close()
    rig.imds.close()
    rig.imds.document()
