"""The lab serves Microsoft's clients for Node, Go and Java as Service Bus does."""

from __future__ import annotations

import pytest

from tests.support.clients import client
from tests.support.paths import DATA
from tests.support.servicebus import ServiceBusLab

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]  # the first run downloads the clients


@pytest.mark.parametrize("language", ["node", "java", "go"])
def test_locks_settlement_with_properties_and_sessions_work(language: str) -> None:
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
        "dead": [["m1", *letter], ["m2", *letter]],
        "sessions": {"locked": True, "ids": ["b", "a"], "bodies": ["b", "a"]},
    }
