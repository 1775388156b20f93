"""What the HTTP status of a receiver's answer means for a delivery."""

from __future__ import annotations

import pytest

from bridge.errors import DeliveryError, Gone, Misconfigured, Rejected, Unavailable
from bridge.sinks.http import webhook_error

ERRORS: dict[type[DeliveryError] | None, list[int]] = {
    None: [200, 201, 202, 204, 226, 299],
    Unavailable: [408, 425, 429, 500, 502, 503, 504, 507, 599],
    Rejected: [400, 409, 413, 422, 431],
    Gone: [410],
    Misconfigured: [300, 301, 302, 304, 307, 308, 401, 403, 404, 405, 407, 411, 415, 418, 451],
}


@pytest.mark.parametrize(
    ("status", "error"), [(status, error) for error, statuses in ERRORS.items() for status in statuses]
)
def test_each_status_means_success_or_one_of_four_errors(
    status: int, error: type[DeliveryError] | None
) -> None:
    assert webhook_error(status) is error


def test_a_chat_receiver_that_is_gone_may_come_back() -> None:
    assert webhook_error(410, is_chat_format=True) is Misconfigured
