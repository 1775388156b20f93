"""What the HTTP client refuses without a connection, reads from headers, and keeps out of texts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from bridge.errors import DeliveryError, Misconfigured
from bridge.http import client as module
from bridge.http.client import HttpClient, origin, register_url, retry_after_seconds
from bridge.http.signing import ID, SIGNATURE, TIMESTAMP, sign, signature_fault
from bridge.runtime.text import redact
from tests.support.http_client import MakeClient


@pytest.fixture
def client(make_client: MakeClient) -> HttpClient:
    return make_client()


NOWHERE = ["", "http://", "ftp://x/", "http://*/", "http://exa mple/", "http://[::1"]
NOT_SENT = ["tök€n", "line\nbreak", " leading blank"]


@pytest.mark.parametrize(
    ("url", "value"),
    [*((url, "x") for url in NOWHERE), *(("http://127.0.0.1/secret", value) for value in NOT_SENT)],
)
def test_an_address_that_leads_nowhere_or_a_header_that_cannot_be_sent_is_a_fault_of_the_settings(
    client: HttpClient, url: str, value: str
) -> None:
    with pytest.raises(DeliveryError) as raised:
        client.exchange("GET", url, {"Authorization": value})
    assert type(raised.value) is Misconfigured
    assert value == "x" or value.strip() not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        "proxy:3128",
        "socks5://user:secret@proxy:1080",
        "http://",
        "http://user:sec/ret@proxy",
        "http://user:secret@[::1",
        "http://user:secret%E2%82%AC@proxy",
    ],
)
def test_a_proxy_that_cannot_be_used_is_refused_and_not_shown(make_client: MakeClient, url: str) -> None:
    with pytest.raises(ValueError, match="expected a proxy such as") as raised:
        make_client(proxy=url)
    assert "sec" not in str(raised.value)


NOW = datetime(2026, 1, 2, 3, 5, 5, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        *(("0", 0), ("7", 7), (" 7 ", 7), ("4000", 100), ("9" * 400, 100)),
        *(("4.2", 4.2), ("4, 4", 4), ("4,9", 4)),
        *((text, None) for text in ("", "soon", "Fri, 99 Jan 2026 03:04:05 GMT", "-7", "4 s", "nan", "²")),
        ("Fri, 02 Jan 2026 03:05:55 GMT", 50),
        ("Fri, 02 Jan 2026 03:04:05 GMT", 0),
        ("Wed, 21 Oct 2915 07:28:00 GMT", 100),
    ],
)
def test_retry_after_is_read_in_seconds_or_as_a_date(
    monkeypatch: pytest.MonkeyPatch, value: str, seconds: float | None
) -> None:
    monkeypatch.setattr(module, "time", SimpleNamespace(time=NOW.timestamp))
    assert retry_after_seconds({"Retry-After": value}, limit_seconds=100) == seconds


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://example.org/path?sig=1#x", "https://example.org"),
        ("http://me:secret@example.org:8080/", "http://example.org:8080"),
        ("https://[::1]:8443/x", "https://[::1]:8443"),
    ],
)
def test_an_address_is_shown_without_what_may_be_secret(url: str, shown: str) -> None:
    assert origin(url) == shown


def test_what_is_long_in_a_url_is_hidden_however_it_is_repeated() -> None:
    register_url("https://user:p%40ss-w0rd@host/hooks/T012345678901234567/x?code=abc%2Bdef%3D%3Dghijklmn&v=1")
    for text in (
        "/hooks/T012345678901234567/x?code=abc%2Bdef%3D%3Dghijklmn&v=1",
        "T012345678901234567",
        "abc%2Bdef%3D%3Dghijklmn",
        "abc+def==ghijklmn",
        "user:p%40ss-w0rd",
        "p@ss-w0rd",
        "code=abc+def==ghijklmn&v=1",
    ):
        assert redact(f"<{text}>") == "<***>"
    assert redact("hooks on the host, v=1") == "hooks on the host, v=1"


# Commands and webhooks are signed as Standard Webhooks says

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"  # noqa: S105 - the vector of the standard
OTHER = "whsec_" + "QUJD" * 8
AT = datetime.fromtimestamp(1614265330, UTC)
BODY = b'{"test": 2432232314}'
MESSAGE = "msg_p5jXN8AQM9LWM0D4loKWxJek"
SIGNED = sign([SECRET], MESSAGE, AT, BODY)


def fault(headers: dict[str, str], *, secrets: tuple[str, ...] = (SECRET,), body: bytes = BODY) -> str:
    return signature_fault(secrets, headers, body, signed_near=AT)


def test_the_vector_of_the_standard_is_signed_as_it_says() -> None:
    assert SIGNED == {
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


@pytest.mark.parametrize(
    ("late", "is_accepted"), [(-301, False), (-300, True), (300, True), (301, False), (None, False)]
)
def test_up_to_five_minutes_between_signing_and_sending_are_accepted_and_no_unknown_age(
    late: float | None, is_accepted: bool
) -> None:
    near = None if late is None else AT + timedelta(seconds=late)
    found = signature_fault([SECRET], SIGNED, BODY, signed_near=near)
    assert found == "" if is_accepted else "five minutes" in found


BROKEN = "none of the known secrets"


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        *(({name: None}, f"no {name}") for name in (ID, TIMESTAMP, SIGNATURE)),
        ({SIGNATURE: "v1,AAAA"}, BROKEN),
        ({SIGNATURE: "g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="}, BROKEN),
        ({SIGNATURE: "v1a,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="}, BROKEN),
        ({SIGNATURE: "\N{SNOWMAN} ,,,"}, BROKEN),
        ({ID: "another"}, BROKEN),
        ({TIMESTAMP: "1614265331"}, BROKEN),
        *(
            ({TIMESTAMP: text}, "unreadable")
            for text in ("soon", "9" * 30, "9" * 5000, "1e9", "nan", "-99999999999999")
        ),
    ],
)
def test_a_header_that_is_missing_changed_or_unreadable_is_told(
    changed: dict[str, str | None], expected: str
) -> None:
    given = {name: value for name, value in {**SIGNED, **changed}.items() if value is not None}
    assert expected in fault(given)


@pytest.mark.parametrize(("body", "another"), [(BODY, BODY + b" "), (b"\xff\xfe", b"\xfe\xff")])
def test_whatever_bytes_are_changed_break_the_signature(body: bytes, another: bytes) -> None:
    signed = sign([SECRET], MESSAGE, AT, body)
    assert fault(signed, body=body) == ""
    assert BROKEN in fault(signed, body=another)
