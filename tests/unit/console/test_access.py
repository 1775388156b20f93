"""Who may look, who may send, and on which address the console starts."""

from __future__ import annotations

import json
from base64 import b64encode
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from bridge.config.base import Secret
from bridge.config.console import ConsoleSettings, IngestSettings
from bridge.console.access import Person, host_fault, sender_fault, sign_in
from bridge.http.signing import sign

SECRET = "a secret that proves the proxy"  # noqa: S105 - of a test
SIGNING = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
NOW = datetime(2026, 11, 20, 13, 0, tzinfo=UTC)
PUBLIC = {
    "listen": "0.0.0.0:8080",
    "public_url": "https://console.contoso.example",
    "ingest": {"bearer_token": "t"},
}


def settings(**given: Any) -> ConsoleSettings:
    return ConsoleSettings.model_validate(given)


def behind_proxy(**given: Any) -> ConsoleSettings:
    return settings(**PUBLIC, auth="proxy", proxy={"secret": SECRET}, approver_groups=["ops"], **given)


def easy_auth(**given: Any) -> ConsoleSettings:
    return settings(**PUBLIC, auth="easyauth", approver_groups=["ops"], **given)


def principal(**claims: str) -> list[tuple[str, str]]:
    text = json.dumps(
        {"name_typ": "name", "role_typ": "roles", "claims": [{"typ": t, "val": v} for t, v in claims.items()]}
    )
    return [("x-ms-client-principal", b64encode(text.encode()).decode())]


@pytest.mark.parametrize("listen", ["127.0.0.1:8080", "[::1]:0", "localhost:8080"])
def test_on_loopback_nothing_more_is_needed(listen: str) -> None:
    assert settings(listen=listen).takes_ingest


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"listen": "0.0.0.0:8080"}, "auth: other machines can reach 0.0.0.0:8080"),
        ({"listen": "10.0.0.4:80", "auth": "easyauth", "public_url": "https://x"}, "expected bearer_token"),
        (
            {"auth": "proxy", "proxy": {"secret": SECRET}, "public_url": "https://x"},
            "through a proxy; expected bearer_token",
        ),
        ({**PUBLIC, "auth": "proxy"}, 'proxy: expected exactly with auth = "proxy"'),
        ({**PUBLIC, "auth": "proxy", "proxy": {"secret": "short"}}, "expected at least 24 characters"),
        (
            {**PUBLIC, "auth": "proxy", "proxy": {"secret": SECRET}, "approver_groups": ["ops,all"]},
            "'ops,all' has a comma",
        ),
        ({**PUBLIC, "auth": "easyauth", "public_url": ""}, "public_url: expected with auth"),
        ({**PUBLIC, "auth": "easyauth", "public_url": "http://x.example"}, "expected https://HOST"),
    ],
)
def test_an_address_that_others_reach_needs_proof_of_who_they_are(given: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValidationError) as raised:
        settings(**given)
    assert fault in str(raised.value)


def test_a_bus_alone_is_enough_to_receive_and_ingest_is_off_then() -> None:
    bus = {"namespace": "contoso.servicebus.windows.net", "topic": "t", "subscription": "s"}
    found = settings(**{**PUBLIC, "ingest": {}}, auth="easyauth", bus=bus)
    assert not found.takes_ingest


def proxied(*headers: tuple[str, str], secret: str = SECRET) -> list[tuple[str, str]]:
    return [("x-proxy-secret", secret), ("x-forwarded-user", "ana"), *headers]


def groups(*names: str) -> list[tuple[str, str]]:
    return [("x-forwarded-groups", name) for name in names]


ANA = Person(name="ana", is_viewer=True, is_approver=False)
STAFF_ONLY = easy_auth(viewer_groups=["staff"])
PERSONS: dict[str, tuple[ConsoleSettings, list[tuple[str, str]], Person | None]] = {
    "the proxy with its secret": (
        behind_proxy(),
        proxied(*groups("dev, ops")),
        replace(ANA, is_approver=True),
    ),
    "a proxy without its secret": (behind_proxy(), proxied(*groups("dev, ops"))[1:], None),
    "a proxy with another secret": (behind_proxy(), proxied(secret="guessed"), None),  # noqa: S106
    "a secret that comes twice": (behind_proxy(), proxied(("x-proxy-secret", "mallory")), None),
    "a user that comes twice": (behind_proxy(), proxied(("x-forwarded-user", "mallory")), None),
    "groups that come twice make no approver": (behind_proxy(), proxied(*groups("dev", "ops")), ANA),
    "Easy Auth names the person and the groups": (
        easy_auth(),
        principal(name="Ana", groups="ops"),
        Person(name="Ana", is_viewer=True, is_approver=True),
    ),
    "only viewers may look where their groups are named": (
        STAFF_ONLY,
        principal(name="Ana", groups="ops"),
        Person(name="Ana", is_viewer=False, is_approver=True),
    ),
}


@pytest.mark.parametrize(("given", "headers", "person"), PERSONS.values(), ids=PERSONS)
def test_a_person_is_who_a_trusted_header_names(
    given: ConsoleSettings, headers: list[tuple[str, str]], person: Person | None
) -> None:
    assert sign_in(given, headers) == person


def test_a_changed_secret_counts_at_once(tmp_path: Path) -> None:
    file = tmp_path / "proxy-secret"
    file.write_text(SECRET)
    found = settings(**PUBLIC, auth="proxy", proxy={"secret": Secret(file=file)})
    for secret in (SECRET, SECRET[::-1]):
        file.write_text(secret)
        signed_in = [bool(sign_in(found, proxied(secret=one))) for one in (SECRET, SECRET[::-1])]
        assert signed_in == [secret == SECRET, secret != SECRET]


@pytest.mark.parametrize(
    "value",
    [
        *("", "x", "e30=", "\u00e9"),
        *(
            b64encode(text).decode()
            for text in (
                *(b'{"claims":[1]}', b"[]", b"7", b"\xff", b"[" * 100_000, b'{"claims":null}'),
                b'{"claims":[{"typ":"groups","val":["ops"]}]}',
                b'{"claims":[{"typ":"preferred_username","val":5}]}',
                b'{"claims":[{"typ":["x"],"val":"y"}],"name_typ":{}}',
            )
        ),
    ],
)
@pytest.mark.usefixtures("without_collection")
def test_a_principal_that_cannot_be_read_is_none(value: str) -> None:
    assert sign_in(easy_auth(), [("x-ms-client-principal", value)]) is None


def test_without_sign_in_another_name_for_this_machine_is_refused() -> None:
    local = settings()
    assert [host_fault(local, host) for host in ("127.0.0.1:8080", "localhost", "[::1]:1")] == ["", "", ""]
    assert host_fault(local, "evil.example:8080")
    assert host_fault(local, "")
    assert not host_fault(easy_auth(), "console.contoso.example")


BY_TOKEN = IngestSettings.model_validate({"bearer_token": "right"})
BY_SIGNATURE = IngestSettings.model_validate({"signing_secret": SIGNING})
SIGNED = sign([SIGNING], "id", NOW, b"{}")
BINARY = {**SIGNED, "ce-specversion": "1.0", "content-type": "application/json"}


@pytest.mark.parametrize(
    ("ingest", "headers", "body", "fault"),
    [
        (BY_TOKEN, {"authorization": "Bearer right"}, b"", ""),
        (BY_TOKEN, {"authorization": "Bearer wrong"}, b"", "the token is wrong"),
        (BY_TOKEN, {}, b"", "expected Authorization: Bearer TOKEN"),
        (BY_SIGNATURE, SIGNED, b"{}", ""),
        (BY_SIGNATURE, SIGNED, b"{ }", "none of the known secrets"),
        (BY_SIGNATURE, {}, b"{}", "no webhook-id"),
        (BY_SIGNATURE, BINARY, b"{}", "binary mode"),  # it does not vouch for attributes in headers
    ],
)
def test_a_sender_proves_itself_by_the_right_token_or_a_signature_over_this_body(
    ingest: IngestSettings, headers: dict[str, str], body: bytes, fault: str
) -> None:
    found = sender_fault(ingest, headers, body, NOW)
    assert fault in found
    assert bool(fault) == bool(found)


def test_a_signature_must_be_recent() -> None:
    assert "within five minutes" in sender_fault(BY_SIGNATURE, SIGNED, b"{}", NOW + timedelta(minutes=6))
