"""Filters match the messages that Service Bus's filters match, and unknown expressions are refused."""

from __future__ import annotations

from typing import Any

import pytest

from bridge.lab.httpd import LabError
from bridge.lab.servicebus.filters import Correlation, Sql
from tests.support.bus_messages import content

MESSAGE: dict[str, Any] = {
    "message_id": "m1",
    "subject": "io.imdsbridge.scheduledevent.scheduled.v1",
    "correlation_id": "E1",
    "properties": {
        "EventType": "Reboot",
        "EventStatus": "Scheduled",
        "Resources": ",vm1,vm2,",
        "it's": "quoted",
        "Count": 3,
        "Live": True,
        "Two words": "yes",
    },
}


@pytest.mark.parametrize(
    "expression",
    [
        "1=1",
        "EventType = 'Reboot'",
        "eventtype = 'Reboot'",
        "user.EventType = 'Reboot'",
        "EventType = 'Reboot' AND EventStatus = 'Scheduled'",
        "EventType IN ('Freeze', 'Reboot')",
        "EventType NOT IN ('Freeze')",
        "Resources LIKE '%,vm1,%'",
        "Resources LIKE '_vm1_vm2_'",
        "Resources NOT LIKE '%vm3%'",
        "EventType LIKE 'R!eboot' ESCAPE '!'",
        "EventType <> 'Freeze'",
        "EventType != 'Freeze'",
        "sys.Label = 'io.imdsbridge.scheduledevent.scheduled.v1'",
        "sys.label LIKE 'io.imdsbridge.scheduledevent.%'",
        "sys.CorrelationId = 'E1' and sys.MessageId = 'm1'",
        "[it's] = 'quoted'",
        "[Two words] = 'yes'",
        "\"Two words\" = 'yes'",
        "Count = 3",
        "Live = TRUE",
        "EXISTS(EventType)",
        "EventType IS NOT NULL AND Missing IS NULL",
        "(EventType = 'Freeze' OR EventType = 'Reboot') AND NOT EventStatus = 'Started'",
        "EventType = 'Freeze' OR Missing = 'x' OR EventType = 'Reboot'",
    ],
)
def test_a_true_expression_matches_the_message(expression: str) -> None:
    assert Sql(expression)(content(**MESSAGE)) is True


@pytest.mark.parametrize(
    "expression",
    [
        "1=0",
        "EventType = 'reboot'",
        "EventType = 'Reboot' AND EventStatus = 'Started'",
        "EventType IN ('Freeze', 'Redeploy')",
        "Resources LIKE 'vm1'",
        "Resources LIKE '%.%'",
        "Missing = 'x'",
        "Missing <> 'x'",
        "NOT Missing = 'x'",
        "Missing IN ('x')",
        "Missing LIKE '%'",
        "Count = '3'",
        "sys.SessionId = 's'",
        "EXISTS(Missing)",
    ],
)
def test_an_expression_that_does_not_hold_or_is_unknown_leaves_the_message(expression: str) -> None:
    assert Sql(expression)(content(**MESSAGE)) is False


def test_a_quote_in_a_text_is_doubled() -> None:
    assert Sql("Name = 'it''s'")(content(properties={"Name": "it's"}))


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "EventType = ",
        "EventType = 'Reboot' nonsense",
        "EventType = 'open",
        "sys.Nonsense = 'x'",
        "other.EventType = 'x'",
        "EventType IN 'x'",
        "(EventType = 'x'",
        "EventType = AND",
        "newid() = 1",
        "1) FROM (SELECT 1",
    ],
)
def test_what_sqlite_does_not_read_is_refused(expression: str) -> None:
    with pytest.raises(LabError) as caught:
        Sql(expression)
    assert repr(expression) in str(caught.value)


def test_an_expression_of_1024_characters_is_taken_and_a_longer_one_refused() -> None:
    start = "a = '"
    assert Sql(start + "x" * (1024 - len(start) - 1) + "'")(content()) is False
    with pytest.raises(LabError, match="at most 1024"):
        Sql(start + "x" * (1024 - len(start)) + "'")


def test_a_correlation_filter_wants_all_its_properties() -> None:
    wanted = Correlation({"CorrelationId": "E1", "Properties": {"eventtype": "Reboot", "Count": 3}})
    assert wanted(content(**MESSAGE))
    assert not wanted(content(**{**MESSAGE, "correlation_id": "E2"}))
    assert not wanted(content(**{**MESSAGE, "properties": {"EventType": "Reboot"}}))
    assert not wanted(content(**{**MESSAGE, "properties": {}}))
