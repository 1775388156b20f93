"""One configuration file works for the lab and for the official emulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bridge.lab.httpd import LabError
from bridge.lab.servicebus.config import load
from tests.support.bus_messages import content
from tests.support.paths import DATA

SHARED = DATA / "servicebus" / "config.json"


def configuration(*, queues: Any = (), topics: Any = ()) -> dict[str, Any]:
    namespace = {"Name": "sbemulatorns", "Queues": list(queues), "Topics": list(topics)}
    return {"UserConfig": {"Namespaces": [namespace], "Logging": {"Type": "File"}}}


def queue(**properties: Any) -> dict[str, Any]:
    return {"Name": "q", "Properties": properties}


def subscription(**rule: Any) -> dict[str, Any]:
    rules = [{"Name": "r", "Properties": rule}] if rule else []
    return {"Name": "s", "Properties": {}, "Rules": rules}


def topic(**rule: Any) -> dict[str, Any]:
    return {"Name": "t", "Properties": {}, "Subscriptions": [subscription(**rule)]}


def test_the_file_that_the_emulator_reads_is_read() -> None:
    namespace = load(SHARED)
    queues = {settings.name: settings.properties for settings in namespace.queues}
    assert queues["short-lock"].lock_duration.total_seconds() == 5
    assert queues["plain"].max_delivery_count == 3
    assert queues["deduplicated"].requires_duplicate_detection
    assert not queues["plain"].requires_duplicate_detection
    assert queues["sessions"].requires_session
    assert queues["expiring"].dead_lettering_on_message_expiration
    (events,) = namespace.topics
    assert [one.name for one in events.subscriptions] == ["all", "by-subject", "by-sql"]
    assert [[rule.name for rule in one.rules] for one in events.subscriptions] == [[], ["subject"], ["sql"]]


def test_a_correlation_filter_names_properties_of_the_message_and_of_the_application() -> None:
    given = {"Label": "subject", "CorrelationId": "c", "Properties": {"EventType": "Reboot"}}
    (topic_settings,) = load(
        configuration(topics=[topic(FilterType="Correlation", CorrelationFilter=given)])
    ).topics
    (matches,) = topic_settings.subscriptions[0].filters()
    assert matches(content(subject="subject", correlation_id="c", properties={"EventType": "Reboot"}))
    assert not matches(content(subject="subject", correlation_id="c"))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({}, "UserConfig"),
        ({"UserConfig": {"Namespaces": []}}, "Namespaces"),
        (configuration(queues=[{"Name": ""}]), "Name"),
        (configuration(queues=[queue(), {"Name": "Q"}]), "given twice: q"),
        (configuration(queues=[queue(LockDuration="1 minute")]), "LockDuration"),
        (configuration(queues=[queue(LockDuration="PT5M1S")]), "LockDuration"),
        (configuration(queues=[queue(ForwardTo="other")]), "ForwardTo"),
        (configuration(topics=[topic(FilterType="Magic")]), "FilterType"),
        (configuration(topics=[topic(FilterType="Sql", SqlFilter={"SqlExpression": "a ="})]), "SQL filter"),
        (
            configuration(topics=[topic(FilterType="Correlation", CorrelationFilter={"Colour": "x"})]),
            "Colour",
        ),
    ],
)
def test_a_faulty_configuration_is_refused_by_name(content: Any, complaint: str) -> None:
    with pytest.raises(LabError) as caught:
        load(content)
    assert complaint in str(caught.value)


def test_a_file_that_is_not_json_or_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="missing"):
        load(tmp_path / "missing")
    for text in ("{", "[]"):
        (tmp_path / "bad").write_text(text)
        with pytest.raises(LabError, match="bad"):
            load(tmp_path / "bad")
