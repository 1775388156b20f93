"""Commands and webhooks are signed as Standard Webhooks says."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from bridge.http.signing import ID, SIGNATURE, TIMESTAMP, sign, signature_fault

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"  # noqa: S105 - the vector of the standard
OTHER = "whsec_" + "QUJD" * 8
AT = datetime.fromtimestamp(1614265330, UTC)
BODY = b'{"test": 2432232314}'
MESSAGE = "msg_p5jXN8AQM9LWM0D4loKWxJek"


def fault(
    headers: dict[str, str], *, secrets: tuple[str, ...] = (SECRET,), body: bytes = BODY, late: float = 0
) -> str:
    return signature_fault(secrets, headers, body, signed_near=AT + timedelta(seconds=late))


def test_the_vector_of_the_standard_is_signed_as_it_says() -> None:
    assert sign([SECRET], MESSAGE, AT, BODY) == {
        ID: MESSAGE,
        TIMESTAMP: "1614265330",
        SIGNATURE: "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


@pytest.mark.parametrize("signing", [[SECRET], [OTHER, SECRET]])
@pytest.mark.parametrize("known", [(SECRET,), (SECRET, OTHER), (OTHER, SECRET)])
def test_a_signature_by_any_known_secret_is_accepted_whatever_the_case_of_the_headers(
    signing: list[str], known: tuple[str, ...]
) -> None:
    headers = sign(signing, MESSAGE, AT, BODY)
    assert fault(headers, secrets=known) == ""
    assert fault({name.title(): value for name, value in headers.items()}, secrets=known) == ""


@pytest.mark.parametrize("late", [-301, -300, 300, 301])
def test_up_to_five_minutes_between_signing_and_sending_are_accepted(late: float) -> None:
    found = fault(sign([SECRET], MESSAGE, AT, BODY), late=late)
    assert ("five minutes" in found) is (abs(late) > 300)
    assert not found or abs(late) > 300


def test_a_message_of_unknown_age_is_refused() -> None:
    headers = sign([SECRET], MESSAGE, AT, BODY)
    assert "five minutes" in signature_fault([SECRET], headers, BODY, signed_near=None)


@pytest.mark.parametrize("name", [ID, TIMESTAMP, SIGNATURE])
def test_a_missing_header_is_named(name: str) -> None:
    headers = sign([SECRET], MESSAGE, AT, BODY)
    del headers[name]
    assert fault(headers) == f"no {name}"


@pytest.mark.parametrize(
    "changed",
    [
        {SIGNATURE: "v1,AAAA"},
        {SIGNATURE: "g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="},
        {SIGNATURE: "v1a,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="},
        {SIGNATURE: "\N{SNOWMAN} ,,,"},
        {ID: "another"},
        {TIMESTAMP: "1614265331"},
    ],
)
def test_whatever_is_changed_breaks_the_signature(changed: dict[str, str]) -> None:
    signed = sign([SECRET], MESSAGE, AT, BODY)
    assert "none of the known secrets" in fault({**signed, **changed})
    assert "none of the known secrets" in fault(signed, body=BODY + b" ")


@pytest.mark.parametrize("timestamp", ["soon", "9" * 30, "9" * 5000, "1e9", "nan", "-99999999999999"])
def test_an_unreadable_timestamp_is_refused(timestamp: str) -> None:
    assert "unreadable" in fault({**sign([SECRET], MESSAGE, AT, BODY), TIMESTAMP: timestamp})


def test_bytes_that_are_no_text_are_signed_like_any_other() -> None:
    signed = sign([SECRET], MESSAGE, AT, b"\xff\xfe")
    assert signed[SIGNATURE].startswith("v1,")
    assert fault(signed, body=b"\xff\xfe") == ""
    assert "none of the known secrets" in fault(signed, body=b"\xfe\xff")
