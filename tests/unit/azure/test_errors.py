"""What the SDK's errors are mapped to, without a bus."""

from __future__ import annotations

import pytest
from azure.servicebus.exceptions import ServiceBusConnectionError, ServiceBusQuotaExceededError

from bridge.azure.servicebus import delivery_error, link_is_intact
from bridge.errors import Unavailable

NO_CONNECTION = "ConnectionsQuotaExceeded for namespace contoso. 276167e3_G47"


@pytest.mark.parametrize("kind", [ServiceBusQuotaExceededError, ServiceBusConnectionError])
def test_a_namespace_without_a_free_connection_is_not_told_as_a_full_entity(kind: type[Exception]) -> None:
    error = kind(message=NO_CONNECTION)  # type: ignore[call-arg] # the SDK's own arguments
    mapped = delivery_error(error, "contoso/events")
    assert type(mapped) is Unavailable  # retried with back-off
    assert str(mapped).startswith(
        "contoso/events: the namespace has no connection left (it accepts 5,000); close"
    )
    assert not link_is_intact(error)  # there was none: the next try connects


def test_any_other_quota_is_told_as_a_full_entity_and_keeps_the_connection() -> None:
    error = ServiceBusQuotaExceededError(message="The maximum entity size has been reached or exceeded.")
    assert "the entity is full" in str(delivery_error(error, "contoso/events"))
    assert link_is_intact(error)
