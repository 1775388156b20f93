"""The simulated Service Bus behaves as the real one, with a clock that the test moves."""

from __future__ import annotations

import base64
import hashlib
import hmac
import sys
import uuid
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest

if sys.platform == "win32":
    pytest.skip("posix: proton has no wheel for Windows", allow_module_level=True)

import proton

from bridge.lab.httpd import LabError
from bridge.lab.run import BUS_FILE
from bridge.lab.servicebus.broker import Broker
from bridge.lab.servicebus.config import Namespace, load
from bridge.lab.servicebus.filters import Correlation, Sql
from bridge.lab.servicebus.messages import (
    ARGUMENT,
    DECODE,
    LOCK_LOST,
    NOT_ALLOWED,
    NOT_FOUND,
    NOT_IMPLEMENTED,
    SESSION_LOST,
    Message,
    Refused,
    parse,
    parse_transfer,
)
from bridge.lab.servicebus.nodes import ManagementNode, check_token, manage
from bridge.lab.servicebus.queues import Events, MessageQueue
from tests.support.bus_messages import DATA, content, encoded, section
from tests.support.clock import MovedClock
from tests.support.consumers import APPROVALS, APPROVER, TOPIC
from tests.support.only import only

# Queues, $cbs and $management

Owner = object


class Lab:
    """A broker with one queue, and its notifications."""

    def __init__(self, **settings: Any) -> None:
        self.lost: list[object] = []
        self.changed: list[MessageQueue] = []
        self.clock = MovedClock()
        entities = {"Queues": [{"Name": "Q", "Properties": settings}], "Topics": [{"Name": "t"}]}
        events = Events(self.clock.wall, self.changed.append, self.lost.append)
        self.broker = Broker(Namespace.model_validate(entities), events)
        self.queue = self.broker.source("q")

    @property
    def dead(self) -> list[tuple[bytes, int, str]]:
        letters = self.broker.source("q/$DeadLetterQueue").messages.values()
        reason = "DeadLetterReason"
        return [
            (one.content.body, one.delivery_count, one.content.application_properties[reason])
            for one in letters
        ]

    @property
    def bodies(self) -> list[bytes]:
        return [message.content.body for message in self.queue.messages.values()]

    def send(self, *bodies: str, **options: Any) -> None:
        self.broker.send("q", [content(body, **options) for body in bodies])

    def move(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.broker.tick()

    def take(self, session_id: str | None = None) -> Message:
        message = self.queue.take(session_id)
        assert message is not None
        return message

    def take_token(self, session_id: str | None = None) -> uuid.UUID:
        token = self.take(session_id).lock_token
        assert token is not None
        return token


def refusal(work: Any, *arguments: Any, **named: Any) -> str:
    """Return the condition of a refusal, or nothing."""
    try:
        work(*arguments, **named)
    except Refused as refused:
        return refused.condition
    return ""


def test_a_lock_that_ends_gives_the_message_to_the_next_and_its_settlement_is_refused() -> None:
    lab = Lab(LockDuration=30)
    lab.send("1")
    first = lab.take_token()
    lab.move(29)
    assert lab.queue.take() is None
    lab.changed.clear()
    lab.move(1)
    assert lab.changed == [lab.queue]
    assert lab.take().delivery_count == 1
    for settle in (lab.queue.complete, lab.queue.abandon, lab.queue.renew):
        assert refusal(settle, first) == LOCK_LOST


def test_a_renewed_lock_ends_later_and_does_not_keep_others_from_ending() -> None:
    lab = Lab(LockDuration=30)
    lab.send("1", "2")
    renewed = lab.take_token()
    lab.take()
    lab.move(20)
    assert lab.queue.renew(renewed) == lab.clock.wall() + 30
    lab.move(10)
    assert lab.take().content.body == b"2"
    assert lab.queue.take() is None


def test_after_the_last_lock_that_ends_a_message_is_dead() -> None:
    lab = Lab(MaxDeliveryCount=3, LockDuration=10)
    lab.send("1")
    for _ in range(3):
        lab.take()
        lab.move(10)
    assert (lab.queue.take(), lab.dead) == (None, [(b"1", 3, "MaxDeliveryCountExceeded")])


@pytest.mark.parametrize("dead_letter", [True, False])
def test_an_expired_message_is_dropped_or_dead_as_the_entity_says(dead_letter: bool) -> None:
    lab = Lab(DefaultMessageTimeToLive=100, DeadLetteringOnMessageExpiration=dead_letter)
    lab.send("short", ttl_seconds=10)
    lab.send("long", ttl_seconds=1000)
    lab.move(10)
    assert lab.bodies == [b"long"]
    lab.move(90)
    assert lab.bodies == []
    assert [one[2] for one in lab.dead] == (["TTLExpiredException"] * 2 if dead_letter else [])


def test_a_message_id_is_taken_once_within_the_window() -> None:
    lab = Lab(RequiresDuplicateDetection=True, DuplicateDetectionHistoryTimeWindow=20)
    lab.send("1", message_id="a")
    lab.queue.complete(lab.take_token())
    lab.move(19)
    lab.send("2", message_id="a")
    assert lab.bodies == []
    lab.move(1)
    lab.send("3", message_id="a")
    assert lab.bodies == [b"3"]
    assert lab.queue.counts["duplicates"] == 1


def test_an_entity_with_partitions_refuses_a_batch_of_several_and_drops_duplicates_within_one() -> None:
    def key(text: str) -> dict[str, Any]:
        return {"annotations": {"x-opt-partition-key": text}}

    def batch(*given: dict[str, Any]) -> str:
        return refusal(lab.broker.send, "q", [content("x", **one) for one in given])

    lab = Lab(EnablePartitioning=True)
    assert batch({}, {}) == batch(key("a"), key("a")) == ""
    assert batch(key("a"), key("b")) == batch(key("a"), {}) == NOT_ALLOWED
    lab = Lab(EnablePartitioning=True, RequiresDuplicateDetection=True)
    ids: list[dict[str, Any]] = [{"message_id": name, **key("a")} for name in ("1", "2")]
    assert (batch(*ids), batch(ids[0]), batch(ids[1])) == (NOT_ALLOWED, "", "")
    assert batch({**ids[0], **key("b")}) == batch(ids[0]) == ""
    assert (lab.queue.counts["enqueued"], lab.queue.counts["duplicates"]) == (3, 1)


def test_the_next_session_is_the_unlocked_one_with_the_oldest_message() -> None:
    lab = Lab(RequiresSession=True)
    for session_id in ("c", "a", "b"):
        lab.send("x", session_id=session_id)
    assert [lab.queue.accept_session(None, Owner()) for _ in range(4)] == ["c", "a", "b", None]


def test_an_expired_session_lock_counts_its_messages_and_notifies_the_owner() -> None:
    lab, owner = Lab(RequiresSession=True, LockDuration=30), Owner()
    lab.send("1", session_id="a")
    lab.queue.accept_session("a", owner)
    token = lab.take_token("a")
    assert refusal(lab.queue.locked, token, Owner()) == SESSION_LOST  # another owner
    lab.move(20)
    assert lab.queue.renew_session("a", owner) == lab.clock.wall() + 30
    lab.move(29)
    assert (lab.queue.locked(token, owner).locked_until, lab.lost) == (lab.clock.wall() + 1, [])
    lab.move(1)
    assert lab.lost == [owner]
    assert refusal(lab.queue.complete, token) == SESSION_LOST
    assert refusal(lab.queue.renew_session, "a", owner) == SESSION_LOST
    lab.queue.accept_session("a", Owner())
    assert lab.take("a").delivery_count == 1


def test_entities_are_found_in_any_letter_case_and_for_what_they_can_do() -> None:
    broker = Lab().broker
    assert broker.target("T").name == "t"
    assert broker.source("Q/$deadLetterQueue") is not broker.source("q")
    assert refusal(broker.target, "nowhere") == refusal(broker.source, "nowhere") == NOT_FOUND
    assert refusal(broker.source, "t") == refusal(broker.target, "q/$deadletterqueue") == NOT_ALLOWED


def signed(*, key: str = "SAS_KEY_VALUE", key_name: str = "RootManageSharedAccessKey") -> str:
    """Return a token, as in Microsoft's documentation of shared access signatures."""
    resource = quote("sb://127.0.0.1:5672/Plain", safe="")
    digest = hmac.new(key.encode(), f"{resource}\n1000".encode(), hashlib.sha256).digest()
    signature = quote(base64.b64encode(digest), safe="")
    return f"SharedAccessSignature sr={resource}&sig={signature}&se=1000&skn={key_name}"


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        (signed(), ""),
        (signed(key="wrong"), "InvalidSignature"),
        (signed(key_name="Nobody"), "InvalidSignature"),
        ("SharedAccessSignature nonsense", "InvalidSignature"),
        (None, "InvalidToken"),
        ("a.b.c", ""),  # taken for one of an identity
    ],
)
def test_a_signature_must_hold(token: str | None, expected: str) -> None:
    request = proton.Message(token, properties={"operation": "put-token", "name": "sb://h/q", "type": "jwt"})
    with pytest.raises(Refused) if expected else nullcontext() as caught:
        check_token(request, key_name="RootManageSharedAccessKey", key="SAS_KEY_VALUE")
    assert caught is None or caught.value.description.startswith(f"{expected}:")


def ask(queue: MessageQueue, operation: str, body: Any, *, owner: object | None = None) -> Any:
    request = proton.Message(body=body, properties={"operation": f"com.microsoft:{operation}"})
    try:
        return manage(queue, request, owner)
    except Refused as refused:
        return refused.status_code, refused.condition


def test_what_the_management_node_cannot_do_is_answered() -> None:
    queue = Lab().queue
    assert ask(queue, "dance", {}) == (501, "amqp:not-implemented")
    assert ask(queue, "renew-lock", {})[0] == 400
    assert ask(queue, "renew-lock", {"lock-tokens": [uuid.uuid4()]}) == (410, LOCK_LOST)


def test_the_reason_of_a_refusal_is_a_symbol_which_net_needs() -> None:
    node: Any = object.__new__(ManagementNode)
    node.bus = SimpleNamespace(intercept=lambda *_: False, broker=Lab().broker)
    node.path, node.connection = "q", SimpleNamespace(endpoints=())
    properties, _ = node.answer(proton.Message(body={}, properties={"operation": "dance"}))
    assert type(properties["errorCondition"]) is proton.symbol


@pytest.mark.parametrize(
    ("status", "left", "dead"),
    [("completed", [], []), ("abandoned", [b"m"], []), ("suspended", [], [(b"m", 0, "odd")])],
)
def test_a_message_is_settled_by_its_lock_token_from_another_receiver(
    status: str, left: list[bytes], dead: list[Any]
) -> None:
    lab = Lab()
    lab.send("m")
    token = lab.take_token()
    body: Any = {"disposition-status": status, "lock-tokens": [token], "deadletter-reason": "odd"}
    body["properties-to-modify"] = {"seen": "yes"}
    assert ask(lab.queue, "update-disposition", {**body, "disposition-status": "defered"})[0] == 501
    assert ask(lab.queue, "update-disposition", body) is None
    assert (lab.bodies, lab.dead) == (left, dead)
    messages = [*lab.queue.messages.values(), *lab.broker.source("q/$DeadLetterQueue").messages.values()]
    assert all(one.content.application_properties["seen"] == "yes" for one in messages)
    assert ask(lab.queue, "update-disposition", body) == (410, LOCK_LOST)


def test_a_session_and_its_message_are_for_who_holds_it_only() -> None:
    lab, owner = Lab(RequiresSession=True), Owner()
    lab.send("m", session_id="a")
    lab.queue.accept_session("a", owner)
    session = {"session-id": "a"}
    assert ask(lab.queue, "renew-session-lock", session) == (410, SESSION_LOST)
    assert ask(lab.queue, "renew-session-lock", session, owner=owner)["expiration"] > 0
    assert ask(Lab().queue, "renew-session-lock", session, owner=owner) == (400, NOT_ALLOWED)
    body = {"disposition-status": "completed", "lock-tokens": [lab.take_token("a")], **session}
    assert ask(lab.queue, "update-disposition", body) == (410, SESSION_LOST)
    assert ask(lab.queue, "update-disposition", body, owner=owner) is None
    assert lab.bodies == []


# Messages keep what their senders wrote, and what Service Bus refuses is refused


def decoded(message: Message) -> Any:
    found = proton.Message()
    found.decode(message.encode())
    return found


def stored(**options: Any) -> Message:
    return Message(**{"content": content("1"), "sequence_number": 9, "enqueued_at": 1.5, **options})


def test_a_message_keeps_its_properties_and_body_on_the_way_to_a_receiver() -> None:
    given = proton.Message(
        body=b"\x00body",
        id="m1",
        subject="s",
        correlation_id="c",
        content_type="application/json",
        group_id="g",
        properties={"text": "t", "number": 5, "small": proton.int32(7), "flag": True},
        annotations={"x-opt-partition-key": "g", "x-opt-sequence-number": 1},
    )
    given.inferred = True
    taken = parse(given.encode())
    assert (taken.message_id, taken.session_id, taken.body) == ("m1", "g", b"\x00body")
    assert taken.application_properties == {"text": "t", "number": 5, "small": 7, "flag": True}
    token = uuid.uuid4()
    message = stored(content=taken, delivery_count=2, lock_token=token, locked_until=61.5, expires_at=61.5)
    sent = decoded(message)
    assert (sent.id, sent.subject, sent.correlation_id, sent.group_id) == ("m1", "s", "c", "g")
    assert sent.properties == given.properties
    assert type(sent.properties["small"]) is proton.int32
    assert (sent.delivery_count, sent.ttl, bytes(sent.body)) == (2, 60, b"\x00body")
    assert sent.instructions == {"x-opt-lock-token": token}
    assert {str(name): value for name, value in sent.annotations.items()} == {
        "x-opt-enqueued-time": 1500,
        "x-opt-sequence-number": 9,
        "x-opt-message-state": 0,
        "x-opt-locked-until": 61500,
        "x-opt-partition-key": "g",
    }


def test_properties_that_are_set_replace_those_of_the_sender_and_the_others_keep_their_types() -> None:
    properties = {f"name{number}": f"value{number}" for number in range(200)}
    given = proton.Message(body=b"1", properties={**properties, "small": proton.int32(5), "name": "old"})
    more = {"name": "new", "DeadLetterReason": "r"}
    changed = parse(given.encode()).with_properties(more)
    sent = decoded(stored(content=changed, dead_letter_source="q"))
    assert sent.properties == {**properties, "small": 5, **more}
    assert type(sent.properties["small"]) is proton.int32
    assert {str(n): v for n, v in sent.annotations.items()}["x-opt-deadletter-source"] == "q"
    assert not sent.instructions


def test_a_batch_is_taken_apart() -> None:
    batch = b"".join(section(DATA, encoded(str(number) * 300)) for number in range(9))
    assert [one.body for one in parse_transfer(batch)] == [str(number).encode() * 300 for number in range(9)]


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"\x00", b"\x00\x53", b"\x00Spdata", b"\x00\x53\x75\xa0\x09short", b"\x00\x80"]
)
def test_a_single_message_is_not_a_batch_whatever_its_body(body: bytes) -> None:
    assert only(parse_transfer(section(DATA, body))).body == body


@pytest.mark.parametrize(
    "data",
    [b"x", b"\x00", b"\x00\x53\x10\x45", b"\x00\x53\x75\xa0\x09short", encoded()[:-3], b"\x00" * 100_000],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    assert refusal(parse_transfer, data) == DECODE


LONG = "x" * 32_000
ACCEPTED: list[dict[str, Any]] = [
    {"message_id": "x" * 128},
    {"session_id": "x" * 128},
    {"properties": {"a": "x" * 32_768}},
    {"properties": {"a": LONG, "b": LONG}},
    {"session_id": "s", "annotations": {"x-opt-partition-key": "s"}},
]
REFUSED_OPTIONS: list[dict[str, Any]] = [
    {"message_id": "x" * 129},
    {"session_id": "x" * 129},
    {"properties": {"a": "x" * 32_769}},
    {"properties": {"a": LONG, "b": LONG, "c": "x" * 2_000}},
    {"session_id": "s", "annotations": {"x-opt-partition-key": "t"}},
]


def test_what_service_bus_refuses_is_refused_and_what_it_accepts_is_not() -> None:
    found = [refusal(parse_transfer, encoded(**options)) for options in ACCEPTED + REFUSED_OPTIONS]
    assert found == [""] * len(ACCEPTED) + [ARGUMENT] * len(REFUSED_OPTIONS)
    scheduled = encoded(annotations={"x-opt-scheduled-enqueue-time": 1})
    assert refusal(parse_transfer, scheduled) == NOT_IMPLEMENTED


# Filters match as Service Bus's do, and a configuration works for the lab and for the official emulator

PROPERTIES = {
    "EventType": "Reboot",
    "EventStatus": "Scheduled",
    "Resources": ",vm1,vm2,",
    "it's": "quoted",
    "Count": 3,
    "Live": True,
    "Two words": "yes",
}
MESSAGE: dict[str, Any] = {
    "message_id": "m1",
    "subject": "io.imdsbridge.scheduledevent.scheduled.v1",
    "correlation_id": "E1",
    "properties": PROPERTIES,
}

TRUE = """
1=1
eventtype = 'Reboot'
user.EventType = 'Reboot'
EventType = 'Reboot' AND EventStatus = 'Scheduled'
EventType IN ('Freeze', 'Reboot')
EventType NOT IN ('Freeze')
Resources LIKE '%,vm1,%'
Resources LIKE '_vm1_vm2_'
Resources NOT LIKE '%vm3%'
EventType LIKE 'R!eboot' ESCAPE '!'
EventType <> 'Freeze'
EventType != 'Fr''eeze'
sys.Label = 'io.imdsbridge.scheduledevent.scheduled.v1'
sys.label LIKE 'io.imdsbridge.scheduledevent.%'
sys.CorrelationId = 'E1' and sys.MessageId = 'm1'
[it's] = 'quoted'
[Two words] = 'yes'
"Two words" = 'yes'
Count = 3
Live = TRUE
EXISTS(EventType)
EventType IS NOT NULL AND Missing IS NULL
(EventType = 'Freeze' OR EventType = 'Reboot') AND NOT EventStatus = 'Started'
EventType = 'Freeze' OR Missing = 'x' OR EventType = 'Reboot'"""
NOT_TRUE = f"""
a = '{"x" * 1018}'
1=0
EventType = 'reboot'
EventType = 'Reboot' AND EventStatus = 'Started'
EventType IN ('Freeze', 'Redeploy')
Resources LIKE 'vm1'
Resources LIKE '%.%'
Missing = 'x'
Missing <> 'x'
NOT Missing = 'x'
Missing IN ('x')
Missing LIKE '%'
Count = '3'
sys.SessionId = 's'
EXISTS(Missing)"""
REFUSED = """
EventType =
EventType = 'Reboot' nonsense
EventType = 'open
sys.Nonsense = 'x'
other.EventType = 'x'
EventType IN 'x'
(EventType = 'x'
EventType = AND
newid() = 1
1) FROM (SELECT 1"""


@pytest.mark.parametrize(("expressions", "expected"), [(TRUE, True), (NOT_TRUE, False)])
def test_an_expression_that_is_true_matches_and_one_that_is_unknown_does_not(
    expressions: str, expected: bool
) -> None:
    message = content(**MESSAGE)
    lines = expressions.strip().splitlines()
    assert [line for line in lines if Sql(line)(message) is not expected] == []


@pytest.mark.parametrize("expression", ["", *REFUSED.strip().splitlines(), f"a = '{'x' * 1019}'"])
def test_what_sqlite_does_not_read_or_is_above_1024_characters_is_refused(expression: str) -> None:
    with pytest.raises(LabError) as caught:
        Sql(expression)
    assert repr(expression) in str(caught.value)


def test_a_correlation_filter_wants_all_its_properties() -> None:
    wanted = Correlation({"CorrelationId": "E1", "Properties": {"eventtype": "Reboot", "Count": 3}})
    assert wanted(content(**MESSAGE))
    assert not wanted(content(**{**MESSAGE, "correlation_id": "E2"}))
    assert not wanted(content(**{**MESSAGE, "properties": {"EventType": "Reboot"}}))


def queue(**properties: Any) -> dict[str, Any]:
    return {"Queues": [{"Name": "q", "Properties": properties}]}


def topic(kind: str, **rule: Any) -> dict[str, Any]:
    rules = [{"Name": "r", "Properties": {"FilterType": kind, **rule}}]
    return {"Topics": [{"Name": "t", "Subscriptions": [{"Name": "s", "Rules": rules}]}]}


@pytest.mark.parametrize(
    ("namespaces", "complaint"),
    [
        ([], "Namespaces"),
        ([{"Queues": [{"Name": ""}]}], "Name"),
        ([queue(LockDuration="1 minute")], "LockDuration"),
        ([queue(LockDuration="PT5M1S")], "LockDuration"),
        ([queue(ForwardTo="other")], "ForwardTo"),
        ([topic("Magic")], "FilterType"),
        ([topic("Sql", SqlFilter={"SqlExpression": "a ="})], "SQL filter"),
        ([topic("Correlation", CorrelationFilter={"Colour": "x"})], "Colour"),
    ],
)
def test_a_faulty_configuration_is_refused_by_name(namespaces: Any, complaint: str) -> None:
    with pytest.raises(LabError) as caught:
        load({"UserConfig": {"Namespaces": namespaces}})
    assert complaint in str(caught.value)


@pytest.mark.parametrize("text", [None, "{", "{}"])
def test_a_file_that_is_missing_or_something_else_is_refused(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "bus.json"
    if text:
        file.write_text(text)
    with pytest.raises(LabError, match=r"bus\.json"):
        load(file)


def test_the_lab_has_the_entities_that_the_snippets_for_consumers_use() -> None:
    namespace = load(BUS_FILE)
    assert [one.name for one in namespace.queues] == [APPROVALS]
    assert [one.name for one in namespace.topics] == [TOPIC]
    assert APPROVER in [one.name for one in namespace.topics[0].subscriptions]
