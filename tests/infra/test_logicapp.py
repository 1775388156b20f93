"""The Logic App that asks in Teams: its definition evaluated on an event, and the command that it sends.

No Azure is here: what the connectors do is written down from their documentation, the rest is the definition's own.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import pytest

from bridge.approvals.command import parse_command
from bridge.imds.diff import Change
from tests.support.only import only
from tests.support.paths import ROOT
from tests.support.samples import change_event, scheduled_event, stored

DEFINITION = json.loads((ROOT / "infra/consumers/logicapp/definition.json").read_text())
PARAMETERS = {name: one["defaultValue"] for name, one in DEFINITION["parameters"].items()}
PARAMETERS |= {"$connections": {name: {"connectionId": name} for name in ("servicebus", "teams")}}
AT = datetime(2026, 11, 20, 13, 0, tzinfo=UTC)
TEXT = r"'(?:[^']|'')*'"


class Safe:
    """`value?['key']`, which is written as `value @safe['key']`."""

    def __init__(self, key: str = "") -> None:
        self.key = key

    def __getitem__(self, key: str) -> Safe:
        return Safe(key)

    def __rmatmul__(self, value: Any) -> Any:
        return None if value is None else value.get(self.key)


def to_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


FUNCTIONS: dict[str, Any] = {
    "base64": lambda text: b64encode(text.encode()).decode(),
    "base64ToString": lambda text: b64decode(text, validate=True).decode(),
    "coalesce": lambda *given: next((one for one in given if one is not None), None),
    "concat": lambda *texts: "".join(texts),
    "encodeURIComponent": lambda text: quote(text, safe=""),
    "formatDateTime": lambda instant, _: f"{datetime.fromisoformat(instant):%Y-%m-%dT%H:%M:%SZ}",
    "join": lambda given, between: between.join(given),
    "json": json.loads,
    "length": len,
    "listCallbackUrl": lambda: "https://callback",
    "null": None,
    "parameters": lambda name: PARAMETERS.get(name, name),
    "replace": lambda text, old, new: text.replace(old, new),
    "safe": Safe(),
    "string": to_text,
    "take": lambda given, count: given[:count],
    "ticks": datetime.fromisoformat,
}


def evaluate(value: Any, names: Mapping[str, Any]) -> Any:
    """Evaluate any value of the definition: the workflow language is Python's but for quotes and `?[`."""
    if isinstance(value, Mapping):
        return {name: evaluate(one, names) for name, one in value.items()}
    if isinstance(value, list):
        return [evaluate(one, names) for one in value]
    if not isinstance(value, str):
        return value
    if re.match("@[^{]", value):
        return _call(value[1:], names)
    return re.sub(rf"@\{{((?:{TEXT}|[^'}}])*)\}}", lambda one: to_text(_call(one[1], names)), value)


def _call(expression: str, names: Mapping[str, Any]) -> Any:
    python = re.sub(TEXT, lambda one: repr(one[0][1:-1].replace("''", "'")), expression)
    return eval(python.replace("?[", " @safe["), {**FUNCTIONS, **names})  # noqa: S307 - the repository's own


def holds(condition: Mapping[str, Any], names: Mapping[str, Any]) -> bool:
    """Evaluate a condition of an `If`."""
    name, given = only(condition.items())
    if name == "and":
        held = [holds(one, names) for one in given]  # all of them: the service may evaluate all
        return all(held)
    if name == "not":
        return not holds(given, names)
    left, right = evaluate(given, names)
    assert name in ("equals", "greater")
    return bool(left == right if name == "equals" else left > right)


def run(answer: dict[str, Any] | None = None, *, now: datetime = AT, **properties: Any) -> dict[str, Any]:
    """Run the workflow with the notice of an event, and with what Teams answers; return what its actions make."""
    event = stored(change_event(Change(kind="scheduled", event=scheduled_event(AT, **properties)), AT))
    trigger = {"ContentData": b64encode(event.body).decode()}
    results: dict[str, Any] = {}
    called: dict[str, Callable[..., Any]] = {"body": results.__getitem__, "outputs": results.__getitem__}
    names = {**called, "triggerBody": lambda: trigger, "utcNow": now.isoformat}

    def follow(actions: Mapping[str, Any]) -> None:
        """Take actions, which the file has in the order of `runAfter`."""
        for name, action in actions.items():
            assert all(other in actions for other in action["runAfter"]), name
            if action["type"] != "If":
                results[name] = evaluate(action["inputs"], names)
            elif holds(action["expression"], names):
                follow(action["actions"])
            if name == "Ask":
                results["Asked"], results["Ask"] = results["Ask"], answer

    follow(DEFINITION["actions"])
    return results


@pytest.mark.parametrize(
    ("properties", "is_asked"),
    [
        ({"EventType": "Reboot"}, True),
        ({"EventType": "Freeze"}, False),
        ({"EventType": None}, False),
        ({"Resources": None, "Description": None}, True),
        ({"NotBefore": ""}, False),
        ({"now": AT + timedelta(seconds=890)}, True),
        ({"now": AT + timedelta(seconds=901)}, False),
    ],
)
def test_a_card_is_for_what_a_person_can_approve(properties: dict[str, Any], is_asked: bool) -> None:
    assert ("Asked" in run(**properties)) == is_asked


def test_the_card_shows_the_event_and_a_text_from_outside_neither_breaks_it_nor_mentions_anyone() -> None:
    done = run(Description='"}], @{utcNow()} <at>all</at> {{DATE(2026)}} ' + "x" * 50_000)
    text = done["Asked"]["body"]["body"]["messageBody"]
    card = json.loads(text)
    assert [one["data"]["decision"] for one in card["actions"]] == ["approve", "leave"]
    for shown in ("Reboot of 2 VM(s)", "web-0, web-1", "{{TIME(2026-11-20T13:15:00Z)}}", "@{utcNow()}"):
        assert shown in text
    assert "<at>" not in text
    assert "{{DATE(2026)" not in text
    assert len(text) < 28_000


def test_only_an_approval_sends_a_command_that_the_listener_reads_into_the_session_of_the_vm() -> None:
    for other in ({"data": {"decision": "leave"}}, None, {}):
        assert "Send" not in run(other)
    done = run({"data": {"decision": "approve"}, "responder": {"email": "ada@example.org"}})
    message, notice = done["Send"]["body"], done["Read"]
    command = parse_command(b64decode(message["ContentData"]), message_id="")
    assert command.event_ids == (notice["data"]["EventId"],)
    assert command.requested_by == "ada@example.org"
    assert (message["SessionId"], message["MessageId"]) == ("shop.web-0", notice["id"])
    assert done["Send"]["path"] == "/approvals/messages"
