"""What the HTTP status of a receiver's answer means for a delivery."""

from __future__ import annotations

import pytest

from bridge.errors import DeliveryError, Gone, Misconfigured, Rejected, Unavailable
from bridge.sinks.http import webhook_error


@pytest.mark.parametrize("status", [200, 201, 202, 204, 226, 299])
def test_any_2xx_is_success(status: int) -> None:
    assert webhook_error(status) is None


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 507, 599])
def test_a_receiver_that_cannot_now_is_asked_again(status: int) -> None:
    assert webhook_error(status) is Unavailable


@pytest.mark.parametrize("status", [400, 409, 413, 422, 431])
def test_a_receiver_that_refuses_the_event_itself_is_not_asked_again(status: int) -> None:
    assert webhook_error(status) is Rejected


def test_a_receiver_that_is_gone_wants_nothing_more() -> None:
    assert webhook_error(410) is Gone


@pytest.mark.parametrize(
    "status", [300, 301, 302, 304, 307, 308, 401, 403, 404, 405, 407, 411, 415, 418, 451]
)
def test_a_redirect_or_any_other_4xx_means_a_wrong_address_or_credentials(status: int) -> None:
    assert webhook_error(status) is Misconfigured


def test_every_http_error_is_one_of_the_four_delivery_errors() -> None:
    errors: set[type[DeliveryError]] = {
        error for status in range(300, 600) if (error := webhook_error(status)) is not None
    }
    assert errors == {Rejected, Gone, Unavailable, Misconfigured}


def test_a_chat_receiver_that_is_gone_may_come_back() -> None:
    assert webhook_error(410, is_chat_format=True) is Misconfigured
