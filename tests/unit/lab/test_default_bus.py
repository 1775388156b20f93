"""The bus that the lab simulates unless it is given another."""

from __future__ import annotations

import json

from bridge.lab.run import BUS_FILE
from tests.support.consumers import APPROVALS, APPROVER, TOPIC


def test_the_lab_has_the_entities_that_the_snippets_for_consumers_use() -> None:
    (namespace,) = json.loads(BUS_FILE.read_text())["UserConfig"]["Namespaces"]
    (topic,) = namespace["Topics"]
    assert [queue["Name"] for queue in namespace["Queues"]] == [APPROVALS]
    assert topic["Name"] == TOPIC
    assert APPROVER in [subscription["Name"] for subscription in topic["Subscriptions"]]
