"""Filters match as Service Bus's do, and a configuration works for the lab and for the official emulator."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

if sys.platform == "win32":
    pytest.skip("posix: proton has no wheel for Windows", allow_module_level=True)

from bridge.lab.httpd import LabError
from bridge.lab.run import BUS_FILE
from bridge.lab.servicebus.config import load
from bridge.lab.servicebus.filters import Correlation, Sql
from tests.support.bus_messages import content
from tests.support.consumers import APPROVALS, APPROVER, TOPIC

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
NOT_TRUE = """
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


def test_an_expression_may_have_1024_characters() -> None:
    assert Sql(f"a = '{'x' * 1018}'")(content()) is False


def test_a_correlation_filter_wants_all_its_properties() -> None:
    wanted = Correlation({"CorrelationId": "E1", "Properties": {"eventtype": "Reboot", "Count": 3}})
    assert wanted(content(**MESSAGE))
    assert not wanted(content(**{**MESSAGE, "correlation_id": "E2"}))
    assert not wanted(content(**{**MESSAGE, "properties": {"EventType": "Reboot"}}))


# --- the configuration ---


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
