"""What the SDK's errors are mapped to, without a bus."""

from __future__ import annotations

import pytest
from azure.servicebus.exceptions import (
    ServiceBusAuthenticationError,
    ServiceBusAuthorizationError,
    ServiceBusConnectionError,
    ServiceBusError,
    ServiceBusQuotaExceededError,
)

from bridge.azure.servicebus import delivery_error, link_is_intact
from bridge.config.values import UNTRUSTED
from bridge.errors import DeliveryError, Misconfigured, Unavailable

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


@pytest.mark.parametrize(
    ("kind", "text", "expected", "advice"),
    [
        (
            ServiceBusAuthenticationError,
            "Failed to authenticate the connection due to exception: [Errno -2] Name or service not known",
            Unavailable,
            "the host name cannot be resolved",
        ),
        (
            ServiceBusAuthorizationError,
            "Ip has been prevented to connect to the endpoint. For more information see: https://aka.ms/x",
            Misconfigured,
            "the namespace's firewall refuses this machine",
        ),
        (
            ServiceBusConnectionError,
            "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: unable to get local issuer certificate",
            Misconfigured,
            UNTRUSTED,
        ),
        (
            ServiceBusError,
            "Handler failed: failed CONNECT via proxy status: 407.",
            Misconfigured,
            "the proxy wants user and password, or other ones, in http_proxy",
        ),
    ],
)
def test_an_error_is_told_as_what_it_is_where_the_sdk_has_no_class_for_it(
    kind: type[Exception], text: str, expected: type[DeliveryError], advice: str
) -> None:
    given = {"message": text}
    mapped = delivery_error(kind(**given), "contoso/events")
    assert type(mapped) is expected
    assert str(mapped).startswith(f"contoso/events: {advice} (")


def test_any_other_quota_is_told_as_a_full_entity_and_keeps_the_connection() -> None:
    error = ServiceBusQuotaExceededError(message="The maximum entity size has been reached or exceeded.")
    assert "the entity is full" in str(delivery_error(error, "contoso/events"))
    assert link_is_intact(error)
