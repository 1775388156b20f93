"""The Logic App that asks in Teams: its expressions evaluated on messages of the lab's bus, and its command.

No Azure is here: what the connectors do is written down from their documentation, the rest is the definition's own.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage, ServiceBusReceivedMessage

from bridge.events.model import StoredEvent
from bridge.imds.diff import Change
from bridge.sinks.servicebus import ServiceBusSink
from tests.support.consumers import ALL, APPROVALS, TOPIC, Listen, bus_config, settings
from tests.support.imds_lab import ImdsLab
from tests.support.paths import ROOT
from tests.support.process import LIMIT_SECONDS, Forward, wait_until
from tests.support.samples import change_event, scheduled_event, stored
from tests.support.servicebus import ServiceBusLab
from tests.support.sink import settings as sink_settings

DEFINITION = json.loads((ROOT / "infra/consumers/logicapp/definition.json").read_text())
EXAMPLE = json.loads((ROOT / "schemas/examples/scheduledevent.scheduled.v1.json").read_text())
SCHEDULED = "io.imdsbridge.scheduledevent.scheduled.v1"
RECEIPT = "io.imdsbridge.approval."
CONNECTIONS = {name: {"connectionId": f"/connections/{name}"} for name in ("servicebus", "teams")}
RESPONDER = {
    "objectId": "1",
    "displayName": "Ada",
    "email": "ada@example.org",
    "userPrincipalName": "ada@example.org",
}
APPROVE = {"data": {"decision": "approve"}, "responder": RESPONDER, "messageId": "1"}
LEAVE = {"data": {"decision": "leave"}, "responder": RESPONDER, "messageId": "1"}
FAILED: dict[str, Any] = {}

# The part of the workflow expression language that the definition uses

Tree = tuple[Any, ...]
TOKEN = re.compile(r"\s*(?:('(?:[^']|'')*')|([A-Za-z]\w*)|(\d+)|([(),\[\]?]))")


class Parser:
    """Parses one expression in a text from a position on; `at` is its end."""

    def __init__(self, text: str, at: int) -> None:
        self.text, self.at = text, at

    def read(self) -> Tree:
        string, name, number, _ = self._next()
        if string:
            tree: Tree = ("value", string[1:-1].replace("''", "'"))
        elif number:
            tree = ("value", int(number))
        elif name == "null":
            tree = ("value", None)
        else:
            assert name, f"no expression at {self.text[self.at :]!r}"
            tree = ("call", name, tuple(self._arguments()))
        while safe := self._skips("?") or self._sees("["):
            self._expect("[")
            tree = ("index", tree, self.read(), safe == "?")
            self._expect("]")
        return tree

    def _arguments(self) -> Iterator[Tree]:
        self._expect("(")
        while not self._skips(")"):
            yield self.read()
            self._skips(",")

    def _next(self) -> tuple[str | None, ...]:
        found = TOKEN.match(self.text, self.at)
        assert found, f"no expression: {self.text[self.at :]!r}"
        self.at = found.end()
        return found.groups()

    def _sees(self, sign: str) -> str:
        return sign if self.text[self.at :].lstrip().startswith(sign) else ""

    def _skips(self, sign: str) -> str:
        if self._sees(sign):
            self.at = self.text.index(sign, self.at) + len(sign)
            return sign
        return ""

    def _expect(self, sign: str) -> None:
        assert self._skips(sign), f"no {sign} at {self.text[self.at :]!r}"


def parts(text: str) -> list[str | Tree]:
    """Split a text of the definition into literals and expressions."""
    if text.startswith("@") and not text.startswith(("@{", "@@")):
        parser = Parser(text, 1)
        tree = parser.read()
        assert parser.at == len(text), f"more than an expression: {text}"
        return [tree]
    assert not text.startswith("@@"), "not needed so far"
    found: list[str | Tree] = []
    at = 0
    while (start := text.find("@{", at)) >= 0:
        parser = Parser(text, start + 2)
        found += [text[at:start], parser.read()]
        assert text[parser.at : parser.at + 1] == "}", f"no end: {text[start:]}"
        at = parser.at + 1
    return [*found, text[at:]]


def to_json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def only_text(function: Any) -> Any:
    """Refuse nulls and numbers where the service expects a text."""

    def checked(*given: Any) -> Any:
        assert all(isinstance(one, str) for one in given), given
        return function(*given)

    return checked


def format_date_time(instant: str, form: str) -> str:
    assert form == "yyyy-MM-ddTHH:mm:ssZ", "not needed so far"
    return f"{datetime.fromisoformat(instant).astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def ticks(instant: str) -> int:
    return (datetime.fromisoformat(instant) - datetime(1, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) * 10


FUNCTIONS = {
    "base64": only_text(lambda text: b64encode(text.encode()).decode()),
    "base64ToString": only_text(lambda text: b64decode(text, validate=True).decode()),
    "coalesce": lambda *given: next((one for one in given if one is not None), None),
    "concat": only_text(lambda *texts: "".join(texts)),
    "encodeURIComponent": only_text(lambda text: quote(text, safe="")),
    "formatDateTime": only_text(format_date_time),
    "join": lambda given, between: between.join(given),
    "json": only_text(json.loads),
    "length": len,
    "replace": only_text(lambda text, old, new: text.replace(old, new)),
    "string": to_json,
    "take": lambda given, count: given[:count],
    "ticks": only_text(ticks),
}
OF_THE_RUN = {"body", "listCallbackUrl", "outputs", "parameters", "triggerBody", "utcNow"}


class Ended(Exception):
    """The run is over."""


@dataclass(kw_only=True)
class Run:
    """One run of the workflow.

    `answer` is the answer of Teams: None while no button is pressed, FAILED if the card cannot be posted.
    `requests` has what the connectors get, by the name of the action.
    """

    trigger: Mapping[str, Any]
    answer: dict[str, Any] | None
    now: datetime
    status: str = ""
    requests: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)

    def start(self) -> Run:
        try:
            self.status = self._all(DEFINITION["actions"])
        except Ended as end:
            self.status = str(end)
        return self

    def evaluate(self, value: Any) -> Any:
        """Evaluate any value of the definition."""
        if isinstance(value, Mapping):
            return {name: self.evaluate(one) for name, one in value.items()}
        if isinstance(value, list):
            return [self.evaluate(one) for one in value]
        if not isinstance(value, str):
            return value
        pieces = parts(value)
        if len(pieces) == 1 and not isinstance(pieces[0], str):
            return self._value(pieces[0])
        return "".join(piece if isinstance(piece, str) else to_json(self._value(piece)) for piece in pieces)

    def holds(self, condition: Mapping[str, Any]) -> bool:
        """Evaluate a condition."""
        ((name, given),) = condition.items()
        if name == "and":
            held = [self.holds(one) for one in given]  # all of them, since the service may evaluate all
            return all(held)
        if name == "not":
            return not self.holds(given)
        left, right = self.evaluate(given)
        if name == "greater":
            assert isinstance(left, int)
            assert isinstance(right, int)
            return left > right
        assert name == "equals", f"what is {name}?"
        return bool(left == right)

    def _value(self, tree: Tree) -> Any:
        if tree[0] == "value":
            return tree[1]
        if tree[0] == "index":
            _, base, key, is_safe = tree
            value, name = self._value(base), self._value(key)
            if value is None and is_safe:
                return None
            assert isinstance(value, dict), f"{name} of {value!r}"
            return value.get(name) if is_safe else value[name]
        name, given = tree[1], [self._value(one) for one in tree[2]]
        return self._of_the_run(name, *given) if name in OF_THE_RUN else FUNCTIONS[name](*given)

    def _of_the_run(self, name: str, *given: str) -> Any:
        if name in ("outputs", "body"):
            return self.results[given[0]]
        if name == "parameters":
            return (defaults() | {"$connections": CONNECTIONS, "team": "t1", "channel": "c1"})[given[0]]
        fixed: dict[str, Any] = {
            "triggerBody": self.trigger,
            "utcNow": self.now.isoformat(),
            "listCallbackUrl": "https://callback",
        }
        return fixed[name]

    def _all(self, actions: Mapping[str, Any]) -> str:
        """Run actions in the order of `runAfter`; an action that waits delays those after it, and the run."""
        states: dict[str, str] = {}
        while ready := [
            name
            for name in actions
            if name not in states and actions[name]["runAfter"].keys() <= states.keys()
        ]:
            for name in ready:
                after = actions[name]["runAfter"].items()
                if any(states[other] == "Waiting" for other, _ in after):
                    states[name] = "Waiting"
                elif all(states[other] in wanted for other, wanted in after):
                    states[name] = self._one(name, actions[name])
                else:
                    states[name] = "Skipped"
        return next((state for state in ("Waiting", "Failed") if state in states.values()), "Succeeded")

    def _one(self, name: str, action: Mapping[str, Any]) -> str:
        kind = action["type"]
        if kind == "If":
            return self._all((action if self.holds(action["expression"]) else action["else"])["actions"])
        if kind == "Terminate":
            raise Ended(action["inputs"]["runStatus"])
        given = self.evaluate(action["inputs"])
        if kind == "Compose":
            self.results[name] = given
        elif kind == "Wait":
            return "Succeeded" if self.answer is None else "Waiting"
        else:
            assert kind in ("ApiConnection", "ApiConnectionWebhook")
            self.requests[name] = given
        if kind == "ApiConnectionWebhook":
            self.results[name] = self.answer
            return "Waiting" if self.answer is None else "Succeeded" if self.answer else "Failed"
        return "Succeeded"


def defaults() -> dict[str, Any]:
    return {name: one["defaultValue"] for name, one in DEFINITION["parameters"].items()}


# What goes in and out


@pytest.fixture
def bus() -> Iterator[ServiceBusLab]:
    with ServiceBusLab(bus_config()) as lab:
        yield lab


@contextmanager
def client_of(bus: ServiceBusLab) -> Iterator[ServiceBusClient]:
    with ServiceBusClient.from_connection_string(bus.connection_string) as client:
        yield client


@contextmanager
def subscription(bus: ServiceBusLab) -> Iterator[Iterator[dict[str, Any]]]:
    """Yield the messages of the subscription, each as the connector passes it to the trigger."""
    with client_of(bus) as client, client.get_subscription_receiver(TOPIC, ALL) as receiver:

        def take() -> Iterator[dict[str, Any]]:
            while messages := receiver.receive_messages(1, max_wait_time=LIMIT_SECONDS):
                receiver.complete_message(messages[0])
                yield trigger_body(messages[0])

        yield take()


def trigger_body(message: ServiceBusReceivedMessage) -> dict[str, Any]:
    """Return a message in the form of the connector's documentation."""
    return {
        "ContentData": b64encode(b"".join(message.body)).decode(),
        "ContentType": message.content_type,
        "ContentTransferEncoding": "Base64",
        "MessageId": message.message_id,
        "Label": message.subject,
        "CorrelationId": message.correlation_id,
        "SessionId": message.session_id,
    }


def publish(bus: ServiceBusLab, *events: StoredEvent) -> None:
    sink = ServiceBusSink(sink_settings(bus, topic=TOPIC))
    try:
        sink.send(events)
    finally:
        sink.close()


def put(bus: ServiceBusLab, request: Mapping[str, Any]) -> None:
    """Send a message as the connector does."""
    assert request["method"] == "post"
    found = re.fullmatch(r"/([^/]+)/messages", request["path"])
    assert found
    body = request["body"]
    message = ServiceBusMessage(
        b64decode(body["ContentData"], validate=True),
        content_type=body["ContentType"],
        session_id=body["SessionId"],
        message_id=body["MessageId"],
        correlation_id=body["CorrelationId"],
    )
    with client_of(bus) as client, client.get_queue_sender(unquote(unquote(found[1]))) as sender:
        sender.send_messages(message, timeout=LIMIT_SECONDS)


def announced(at: datetime, **properties: Any) -> StoredEvent:
    """Return an event that announces a scheduled event."""
    return stored(change_event(Change(kind="scheduled", event=scheduled_event(at, **properties)), at))


def run(event: StoredEvent, answer: dict[str, Any] | None = None, *, at: datetime | None = None) -> Run:
    """Run the workflow with an event, without the bus."""
    trigger = {"ContentData": b64encode(event.body).decode()}
    return Run(trigger=trigger, answer=answer, now=at or datetime.now(UTC)).start()


def card_of(done: Run) -> dict[str, Any]:
    return dict(json.loads(done.requests["Ask"]["body"]["body"]["messageBody"]))


def texts(card: Any) -> Iterator[str]:
    if isinstance(card, dict):
        for name, one in card.items():
            if name == "text":
                yield one
            else:
                yield from texts(one)
    elif isinstance(card, list):
        for one in card:
            yield from texts(one)


# Which events


@pytest.mark.parametrize(
    ("properties", "is_asked"),
    [
        ({"EventType": "Reboot"}, True),
        ({"EventType": "Redeploy"}, True),
        ({"EventType": "Terminate"}, True),
        ({"EventType": "Freeze"}, False),
        ({"EventType": "Preempt"}, False),
        ({"EventType": "Unheard"}, False),
        ({"EventType": None}, False),
        ({"EventSource": "User"}, True),
        ({"Resources": []}, True),
        ({"Resources": None}, True),
        ({"Description": None}, True),
        ({"NotBefore": ""}, False),
        ({"NotBefore": None}, False),
    ],
)
def test_a_card_is_for_what_a_person_can_approve(properties: dict[str, Any], is_asked: bool) -> None:
    done = run(announced(datetime.now(UTC), **properties))
    assert ("Ask" in done.requests) is is_asked
    assert done.status == ("Cancelled" if is_asked else "Succeeded")


def test_an_event_without_a_session_or_that_has_started_makes_no_card() -> None:
    at = datetime.now(UTC)
    event = announced(at)
    assert b'"shop.web-0"' in event.body
    assert run(replace(event, body=event.body.replace(b'"shop.web-0"', b"null"))).requests == {}
    assert run(event, at=at + timedelta(seconds=890)).requests
    assert run(event, at=at + timedelta(seconds=901)).requests == {}


# The card


def test_the_card_shows_the_impact_the_time_and_the_vms() -> None:
    at = datetime.now(UTC)
    card = card_of(run(announced(at)))
    assert tuple(map(int, card["version"].split("."))) <= (1, 4)
    shown = "\n".join(texts(card))
    start = f"{at + timedelta(minutes=15):%Y-%m-%dT%H:%M:%SZ}"
    assert "Reboot of 2 VM(s)" in shown
    assert "web-0, web-1" in shown
    assert f"{{{{DATE({start}, SHORT)}}}} {{{{TIME({start})}}}}" in shown
    assert "An approval releases all of these VMs" in shown
    assert "Host server is undergoing maintenance." in shown
    assert [one["data"]["decision"] for one in card["actions"]] == ["approve", "leave"]
    assert {one["type"] for one in card["actions"]} == {"Action.Submit"}


@pytest.mark.parametrize(
    "description", ['"}], "x": ["', "a\\nb\n\t\\", "@{utcNow()} @@", "\N{GRINNING FACE} é \x00"]
)
def test_a_text_from_outside_cannot_break_the_card(description: str) -> None:
    assert f"From Azure: {description}" in texts(
        card_of(run(announced(datetime.now(UTC), Description=description)))
    )


def test_a_text_from_outside_cannot_mention_anyone_and_is_truncated() -> None:
    hostile = "<at>everybody</at> {{DATE(2026-01-01T00:00:00Z)}} " + "x" * 50_000
    card = card_of(run(announced(datetime.now(UTC), Description=hostile)))
    (shown,) = [text for text in texts(card) if "everybody" in text]
    assert "<at>" not in shown
    assert "{{" not in shown
    assert len(json.dumps(card).encode()) < 28_000


# The answer


@pytest.mark.parametrize(
    ("answer", "status"), [(LEAVE, "Succeeded"), (None, "Cancelled"), (FAILED, "Failed")]
)
def test_without_an_approval_nothing_is_sent(answer: dict[str, Any] | None, status: str) -> None:
    done = run(announced(datetime.now(UTC)), answer)
    assert set(done.requests) == {"Ask"}
    assert done.status == status


def test_the_approver_is_passed_on_whichever_name_teams_gives() -> None:
    event = announced(datetime.now(UTC))
    for responder, name in [
        (RESPONDER, "ada@example.org"),
        ({"userPrincipalName": "ada#EXT#@example.org"}, "ada#EXT#@example.org"),
        ({}, "a Teams user"),
    ]:
        done = run(event, {**APPROVE, "responder": responder})
        assert done.results["Command"]["RequestedBy"] == name


def test_the_listener_accepts_the_command_that_a_pressed_button_makes_of_a_real_notice(
    bus: ServiceBusLab, tmp_path: Path
) -> None:
    with ImdsLab(vms=("web-0", "web-1")) as imds, subscription(bus) as messages:
        forward = Forward(tmp_path / "forward", settings(imds, bus))
        listen = Listen(tmp_path / "listen", settings(imds, bus))
        with forward, listen:
            event_id = imds.schedule(event_type="Reboot", resources=["web-0", "web-1"], notice_seconds=900)
            notice = first(messages, SCHEDULED)
            done = Run(trigger=notice, answer=APPROVE, now=datetime.now(UTC)).start()
            put(bus, done.requests["Send"])
            put(bus, done.requests["Send"])  # a repeated run
            receipt = read(first(messages, RECEIPT))
            wait_until(lambda: bus.entity(APPROVALS).counts.completed == 2, describe=listen.__repr__)
            assert (listen.stop(), forward.stop()) == (0, 0)
        assert [one.event_id for one in imds.approvals] == [event_id]
    assert (receipt["type"], receipt["data"]["Reason"]) == (f"{RECEIPT}accepted.v1", "approved")
    assert receipt["causationid"] == notice["MessageId"]
    assert receipt["data"]["EventId"] == event_id
    assert receipt["data"]["Resources"] == ["web-0", "web-1"]
    assert receipt["data"]["Command"]["RequestedBy"] == "ada@example.org"


def first(messages: Iterator[dict[str, Any]], prefix: str) -> dict[str, Any]:
    """Receive messages until one has a type with this prefix."""
    return next(body for body in messages if body["Label"].startswith(prefix))


def read(body: Mapping[str, Any]) -> dict[str, Any]:
    return dict(json.loads(b64decode(body["ContentData"])))
