"""What the tests of documents and changes share: documents, a watch in steps, the rules of CloudEvents."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from bridge.imds.diff import Change, Observation, Watch, compare
from bridge.imds.document import Document, parse_document
from bridge.imds.instance import Vm
from tests.support.paths import DATA

RECORDED = sorted((DATA / "imds").glob("*.json"))
FIRST = "C7061BAC-AFDC-4513-B24B-AA5F13A16123"
SECOND = "4CAEA225-A741-474D-A72E-428C86FCD853"
NOT_BEFORE = "Mon, 11 Apr 2022 22:26:58 GMT"
BEFORE_START = 1_649_714_400.0  # 22 minutes before NOT_BEFORE, in seconds since 1970

# The same examples on every run where a red run must mean a changed project; a slow machine is no fault.
_IS_CI = bool(os.environ.get("CI"))


def trials(number: int) -> int:
    """Return how often to try: CI makes all trials, a run beside it a third, for each draws others."""
    return number if _IS_CI else number // 3


steady = settings(
    deadline=None,
    derandomize=_IS_CI,
    max_examples=trials(100),
    suppress_health_check=[HealthCheck.too_slow],
)
thorough = settings(steady, max_examples=trials(150))
LEAVES: st.SearchStrategy[Any] = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
NAMES = st.text(max_size=5)


def json_values(
    leaves: st.SearchStrategy[Any] = LEAVES, names: st.SearchStrategy[str] = NAMES
) -> st.SearchStrategy[Any]:
    """Make any JSON of `leaves`, whose objects have properties of `names`."""
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
        max_leaves=6,
    )


VM = Vm(
    name="web-0",
    vm_id="8f9c2d5e-0000-4000-8000-000000000001",
    resource_id="/subscriptions/0000/resourceGroups/shop/providers/Microsoft.Compute/virtualMachines/web-0",
    location="westeurope",
    zone="1",
    subscription_id="0000",
    resource_group="shop",
    tags={"env": "test"},
)


def entry(event_id: Any = FIRST, status: Any = "Scheduled", **fields: Any) -> dict[str, Any]:
    """Return an event of the newest api-version; a field given as `...` is left out."""
    whole = {
        "EventId": event_id,
        "EventStatus": status,
        "EventType": "Reboot",
        "ResourceType": "VirtualMachine",
        "Resources": ["web-0"],
        "NotBefore": "" if status == "Started" else NOT_BEFORE,
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
        **fields,
    }
    return {name: value for name, value in whole.items() if value is not ...}


def body(incarnation: Any, *entries: Any, **fields: Any) -> bytes:
    """Return an answer of IMDS; an incarnation given as `...` is left out."""
    document = {"DocumentIncarnation": incarnation, "Events": list(entries), **fields}
    return json.dumps({name: value for name, value in document.items() if value is not ...}).encode()


def document(incarnation: Any, *entries: Any, **fields: Any) -> Document:
    return parse_document(body(incarnation, *entries, **fields))


class Watcher:
    """Compares one document after another, with a second between them unless a test says otherwise."""

    def __init__(self, *documents: Document) -> None:
        self.watch = Watch()
        self.at = BEFORE_START
        self.changes: tuple[Change, ...] = ()
        for each in documents:
            self.see(each)

    def see(
        self, current: Document, *, after: float = 1.0, restarted: bool = False, **circumstances: Any
    ) -> list[str]:
        """Return what became of the events, as `kind EventId`."""
        self.at += after
        observation = Observation(at=self.at, gap_seconds=None if restarted else after, **circumstances)
        self.watch, self.changes = compare(self.watch, current, observation)
        return kinds(self.changes)


def kinds(changes: Iterable[Change]) -> list[str]:
    return [f"{change.kind} {change.event.event_id}" for change in changes]


# CloudEvents 1.0.2, stricter than the published schema: names, no objects, formats, no control characters.
_TEXT = {"type": "string", "minLength": 1, "pattern": r"^[^\u0000-\u001f\u007f-\u009f\ud800-\udfff]+$"}
ENVELOPE_SCHEMA = {
    "type": "object",
    "required": ["specversion", "id", "source", "type"],
    "properties": {
        "specversion": {"const": "1.0"},
        "id": _TEXT,
        "source": {**_TEXT, "format": "uri-reference"},
        "type": {**_TEXT, "pattern": r"^io\.imdsbridge\.[a-z]+\.[a-z]+\.v[0-9]+$"},
        "subject": _TEXT,
        "time": {**_TEXT, "format": "date-time", "pattern": r"^\d{4}-.*\.\d{3}Z$"},
        "dataschema": {**_TEXT, "format": "uri"},
        "datacontenttype": {"const": "application/json"},
        "data": {"type": "object"},
    },
    "patternProperties": {
        "^(?!data$)[a-z0-9]{1,20}$": {
            "anyOf": [
                _TEXT,
                {"type": "boolean"},
                {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
            ]
        }
    },
    "additionalProperties": False,
}
_validator = Draft202012Validator(ENVELOPE_SCHEMA, format_checker=Draft202012Validator.FORMAT_CHECKER)


def envelope_of(encoded: bytes) -> dict[str, Any]:
    """Read a structured event as a strict reader of JSON would."""
    envelope: dict[str, Any] = json.loads(encoded, parse_constant=_refuse)
    return envelope


def faults_of(envelope: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with an envelope by the rules of CloudEvents 1.0."""
    return [f"{error.json_path}: {error.message}" for error in _validator.iter_errors(envelope)]


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")
