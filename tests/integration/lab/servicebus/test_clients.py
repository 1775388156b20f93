"""The lab serves Microsoft's clients for Node, Go and Java as Service Bus does."""

from __future__ import annotations

import pytest

from bridge.lab.servicebus import ServiceBusLab
from tests.support.clients import client
from tests.support.paths import DATA

pytestmark = pytest.mark.timeout(900)  # the first run downloads the clients

RULES = ["$Default", "subject", "sql"]
NO_PROPERTIES = (
    "correlationId",
    "messageId",
    "to",
    "replyTo",
    "sessionId",
    "replyToSessionId",
    "contentType",
)
FILTERS = [
    {"sqlExpression": "1=1"},
    dict.fromkeys(NO_PROPERTIES)
    | {"subject": "wanted", "applicationProperties": {"EventStatus": "Scheduled"}},
    {
        "sqlExpression": "EventType IN ('Reboot', 'Redeploy') AND Resources LIKE '%,vm1,%' AND sys.Label = 'wanted'"
    },
]


@pytest.mark.parametrize(
    ("language", "more"),
    [("node", {"rules": RULES, "filters": FILTERS}), ("java", {"rules": RULES}), ("go", {})],
    ids=["node", "java", "go"],
)
def test_locks_settlement_with_properties_sessions_and_rules_work(
    language: str, more: dict[str, object]
) -> None:
    run = client(language)
    with ServiceBusLab(DATA / "servicebus" / "config.json") as lab:
        result = run("features", lab.connection_string)
        assert lab.failures == ()
        assert lab.entity("plain").dead_letters == ()
    letter = ["malformed", "no EventId", "client"]
    assert result == {
        "renewed": True,
        "tokens": True,
        "abandoned": {"tried": "once", "given": "changed"},
        "deferred": "yes",
        "dead": [["m1", *letter], ["m2", *letter]],
        "sessions": {"locked": True, "state": "half-way", "ids": ["b", "a"], "bodies": ["b", "a"]},
        **more,
    }
