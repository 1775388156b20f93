"""The configuration: file and environment, and every error at once, with no secret in any of them."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from socket import AF_INET, AF_INET6, AddressFamily
from typing import Any

import pytest

from bridge.azure.servicebus import connect
from bridge.cli.config import warnings
from bridge.config import loader as loader_module
from bridge.config import registry
from bridge.config.base import Secret
from bridge.config.bus import ReceiverSettings, ServiceBusSettings
from bridge.config.loader import DEFAULT_PATH, load
from bridge.config.models import Config
from bridge.config.registry import FORMATS
from bridge.config.sinks import WebhookSettings
from bridge.config.values import check_url, parse_headers, quote_path, socket_address
from bridge.errors import ConfigError, Misconfigured
from tests.support.only import only
from tests.support.process import toml
from tests.support.receivers import FORMATS as ROWS
from tests.support.settings import SECRET, fault, faults, read, stdout, webhook


def only_sink(config: Config) -> Any:
    return only(config.sinks.values())


@pytest.mark.posix("the default path is of POSIX")
def test_the_default_file_may_be_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    monkeypatch.setattr(loader_module, "DEFAULT_PATH", file)
    config = load(None, {})
    assert dict(config.sinks) == {}
    assert (config.imds.endpoint, config.imds.poll_seconds) == ("http://169.254.169.254", 1.0)
    assert (config.stop_seconds, config.max_outbox_mb, config.retain_seconds) == (5.0, 1024, 7 * 86_400)
    assert str(DEFAULT_PATH) == "/etc/imds-bridge/config.toml"
    file.write_text("stop_seconds = 9\n[sinks.screen]\nkind = 'stdout'")
    config = load(None, {})
    assert (config.stop_seconds, only_sink(config).max_age_seconds) == (9, 7 * 86_400)


# The environment


def test_the_environment_alone_is_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loader_module, "DEFAULT_PATH", tmp_path / "absent")
    ops = {
        "KIND": "webhook",
        "URL": "https://example.org/{event}",
        "TYPES": '["io.imdsbridge.document.*", "io.imdsbridge.imds.*"]',
        "WHERE": '{"EventType": ["Reboot"], "AffectsThisVm": true}',
        "HEADERS": '{"X-Key": "abc"}',
        "FROM_START": "true",
    }
    others = {"STATE_DIR": "/state", "IMDS__POLL_SECONDS": "2.5", "SINKS__AUDIT": '{"kind": "stdout"}'}
    variables = {**others, **{f"SINKS__OPS__{name}": value for name, value in ops.items()}}
    config = load(None, {f"IMDS_BRIDGE__{name}": value for name, value in variables.items()})
    sink = config.sinks["ops"]
    assert isinstance(sink, WebhookSettings)
    assert (config.state_dir.as_posix(), config.imds.poll_seconds) == ("/state", 2.5)
    assert sink.url.read() == "https://example.org/{event}"
    assert sink.types == ("io.imdsbridge.document.*", "io.imdsbridge.imds.*")
    assert sink.where == {"EventType": ["Reboot"], "AffectsThisVm": True}
    assert sink.headers is not None
    assert parse_headers(sink.headers.read()) == {"X-Key": "abc"}
    assert sink.from_start is True
    assert config.sinks["audit"].kind == "stdout"


def test_the_environment_overrides_the_file_key_by_key_in_any_letter_case(tmp_path: Path) -> None:
    sink = {"kind": "webhook", "url": "https://example.org", "mode": "binary"}
    text = toml({"imds": {"poll_seconds": 2, "api_version": "2024-07-09"}, "sinks": {"OpsRoom": sink}})
    environ = {
        "IMDS_BRIDGE__IMDS__POLL_SECONDS": "3",
        "IMDS_BRIDGE__SINKS__OPSROOM__URL": "https://other.example.org",
        "imds_bridge__stop_seconds": "8",
        "IMDS_BRIDGE_PORT": "tcp://10.0.0.1:80",  # one underscore: Kubernetes sets these
    }
    config = read(tmp_path, text, environ)
    assert (config.imds.poll_seconds, config.imds.api_version, config.stop_seconds) == (3, "2024-07-09", 8)
    assert list(config.sinks) == ["OpsRoom"]
    assert (only_sink(config).url.read(), only_sink(config).mode) == ("https://other.example.org", "binary")


@pytest.mark.parametrize(
    ("name", "value"),
    [("POLICY__ALLOW", "[{}]"), ("POLICY", '{"allow": [{}]}'), ("AUTO", "[{}]"), ("GRACE_SECONDS", "5")],
)
def test_variables_that_set_what_may_be_approved_are_named(tmp_path: Path, name: str, value: str) -> None:
    variable = f"IMDS_BRIDGE__APPROVALS__{name}"
    text = "[approvals]\nnamespace = 'contoso.servicebus.windows.net'\nqueue = 'approvals'\n"
    config = read(tmp_path, text, {variable: value})
    assert config.policy_variables == (() if name == "GRACE_SECONDS" else (variable,))
    assert any(variable in text for _, text, _ in warnings(config)) == (name != "GRACE_SECONDS")


def test_a_secret_of_the_environment_replaces_a_file_and_a_file_a_secret(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("from-the-file\n")
    name = "IMDS_BRIDGE__SINKS__OPS__BEARER_TOKEN"
    config = read(tmp_path, webhook(bearer_token_file=token), {name: "from-the-environment"})
    assert only_sink(config).bearer_token == Secret("from-the-environment")
    config = read(tmp_path, webhook(bearer_token="in-the-clear"), {f"{name}_FILE": str(token)})  # noqa: S106
    assert only_sink(config).bearer_token == Secret(file=token)


@pytest.mark.parametrize("name", ["signing_secret", "signing_secrets"])
@pytest.mark.parametrize("written", ["signing_secret", "signing_secrets", "signing_secret_file"])
def test_a_signing_secret_is_replaced_however_it_is_spelled(tmp_path: Path, name: str, written: str) -> None:
    old, new = "whsec_" + "QUJD" * 8, "whsec_" + "REVG" * 8
    config = read(tmp_path, webhook(**{written: old}), {f"IMDS_BRIDGE__SINKS__OPS__{name.upper()}": new})
    assert only_sink(config).signing_secrets.read() == new


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        *(("stop_seconds", text, number) for text, number in (("3", 3.0), ("2.5", 2.5), ("1e1", 10.0))),
        *(("sinks__ops__from_start", text, True) for text in ("true", "True", "1", "yes", "on")),
        *(("sinks__ops__from_start", text, False) for text in ("false", "FALSE", "0", "no", "off")),
        ("sinks__ops__max_per_second", "7", 7.0),
        ("sinks__ops", '{"kind": "stdout", "from_start": true, "max_per_second": 7}', True),
    ],
)
def test_a_variable_is_a_text_also_for_numbers_and_booleans(
    tmp_path: Path, key: str, value: str, expected: Any
) -> None:
    config = read(tmp_path, stdout(), {f"IMDS_BRIDGE__{key.upper()}": value})
    name = key.rpartition("__")[2].replace("ops", "from_start")
    assert getattr(only_sink(config) if "sinks" in key else config, name) == expected


def test_in_the_json_of_a_variable_numbers_and_booleans_have_no_quotes(tmp_path: Path) -> None:
    given = {"kind": "stdout", "from_start": "true", "max_per_second": "7"}
    found = faults(tmp_path, "", {"IMDS_BRIDGE__SINKS__OPS": json.dumps(given)})
    variable = "(from the environment variable IMDS_BRIDGE__SINKS__OPS)"
    assert found == [
        f'sinks.ops.from_start: given "true", expected true or false {variable}',
        f'sinks.ops.max_per_second: given "7", expected a number {variable}',
    ]


def test_an_error_in_the_environment_names_the_variable(tmp_path: Path) -> None:
    given = {
        "STOP_SECONDS": "soon",
        "IMDS__POL_SECONDS": "1",
        "SINKS__A": '{"kind": "webhook", "url": "https://x", "mode": "binari"}',
        "SINKS__B": f'{{"kind": "webhook", "url": "https://x?sig={SECRET}"',
        "SINKS__C__KIND": "webhook",
        "SINKS__C__URL_FILE": "/does/not/exist",
    }
    found = faults(tmp_path, "", {f"IMDS_BRIDGE__{name}": value for name, value in given.items()})
    expected = {
        "stop_seconds": "STOP_SECONDS",
        "imds.pol_seconds": "IMDS__POL_SECONDS",
        "sinks.a.mode": "SINKS__A",
        "sinks.b": "SINKS__B",
        "sinks.c.url_file": "SINKS__C__URL_FILE",
    }
    by_key = {fault.partition(":")[0]: fault for fault in found}
    assert set(by_key) == set(expected)
    for key, variable in expected.items():
        assert by_key[key].endswith(f"(from the environment variable IMDS_BRIDGE__{variable})")


# Faults


def test_all_errors_are_reported_at_once(tmp_path: Path) -> None:
    found = faults(
        tmp_path,
        """
        log_levl = "info"
        stop_seconds = 9999
        [imds]
        poll_second = 3
        [sinks.a]
        kind = "webhok"
        [sinks.b]
        kind = "webhook"
        url = "http://example.org"
        mode = "binari"
        haeders = {}
        """,
    )
    keys = ["imds.poll_second", "log_levl", "sinks.a.kind", "sinks.b.haeders", "sinks.b.mode", "sinks.b.url"]
    assert sorted(fault.partition(":")[0] for fault in found) == [*keys, "stop_seconds"]
    assert only(fault for fault in found if "webhok" in fault).endswith("; did you mean webhook?")


A_PORT, A_PATTERN = "expected an address and a port", "expected a text that matches pattern"
HTTPS = "expected https; set allow_http = true to send without encryption"
MODES = "'structured', 'binary' or 'batch'"
TEAMS = "https://contoso.webhook.office.com/webhookb2/1@2/IncomingWebhook/3/4"
OLD_TEAMS = "https://outlook.office.com/webhook/1@2/IncomingWebhook/3/4"
DISCORD = "https://discord.com/api/webhooks/1/abc"
RETIRED = "sinks.ops.url: given a connector of Teams, which are retired; expected the URL of a workflow"
SLACK = "sinks.ops.url: given a webhook of Discord; expected its URL with /slack at the end"
ENDPOINT = "http://169.254.169.254/metadata/scheduledevents"
POSIX = pytest.mark.posix("the paths are of POSIX")
AUTO = "[[approvals.auto]]"
NO_FILE = "expected a file that can be read: No such file or directory"
BUS = '[approvals]\nnamespace = "contoso.servicebus.windows.net"\n'


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("sinks = 5", "sinks: expected tables such as [sinks.ops]"),
        (f'sinks = "{SECRET}"', "sinks: expected tables such as [sinks.ops]"),
        (f'[sinks]\nops = "{SECRET}"', "sinks.ops: given a text, expected a table: [sinks.NAME]"),
        ("imds = 5", "imds: given 5, expected a table"),
        ("metrics = 5", "metrics: given 5, expected a table"),
        ('[sinks.ops]\nurl = "x"', "sinks.ops.kind: given null, expected one of "),
        ("state_dir = 5", "state_dir: given 5, expected a path"),
        ("log_levl = 'info'", "log_levl: unknown key; did you mean log_level?"),
        ("stop_seconds = 9999", "stop_seconds: given 9999, expected less than or equal to 600"),
        (
            "source = 'two words'",
            "source: given \"two words\", expected a text that matches pattern '^[!-~]*$'",
        ),
        ("max_outbox_mb = inf", "max_outbox_mb: given Infinity, expected a finite number"),
        ("max_outbox_mb = 1e308", "max_outbox_mb: given 1e+308, expected less than or equal to 1000000"),
        ("[imds]\npoll_seconds = 0.1", "imds.poll_seconds: given 0.1, expected greater than or equal to 0.2"),
        ("imds.poll_second = 3", "imds.poll_second: unknown key; did you mean poll_seconds?"),
        (
            "imds.api_version = 'latest'",
            f"imds.api_version: given \"latest\", {A_PATTERN} '^[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}$'",
        ),
        (
            f"imds.endpoint = 'http://user:{SECRET}@1.2.3.4'",
            'imds.endpoint: given "http://***@1.2.3.4", expected a URL without user and password; use bearer',
        ),
        ("[sink.x]", "sink: unknown key; did you mean sinks?"),
        ("[imds]\npoll_seconds = nan", "imds.poll_seconds: given NaN, expected"),
        ('[imds]\nendpoint = "169.254.169.254"', 'imds.endpoint: given "169.254.169.254", expected a URL'),
        (
            '[imds]\nvm_name = "a"\n[approvals]\nnamespace = "n.example"\nqueue = "q"\nsession = "{subscription}"',
            "imds.vm_name: given with a session of more than {vm}",
        ),
        ('[imds]\nvm_name = "web 0"', 'imds.vm_name: given "web 0", expected a text that matches'),
        ('[metrics]\nlisten = "9464"', f'metrics.listen: given "9464", {A_PORT}'),
        ('[metrics]\nlisten = ":9464"', f'metrics.listen: given ":9464", {A_PORT}'),
        ('[metrics]\nlisten = "::1:66000"', f'metrics.listen: given "::1:66000", {A_PORT}'),
        (f"{BUS}queue = 5", "approvals.queue: given 5"),  # which is not reported as missing as well
        (f'{BUS}qeue = "a"', "approvals.qeue: unknown key; did you mean queue?"),
        (webhook(url=None), "sinks.ops.url: is missing (or url_file)"),
        (webhook(url=5), "sinks.ops.url: given ***, expected a text"),
        (webhook(url=f"{SECRET}.example.org"), "sinks.ops.url: given ***, expected a URL such as"),
        (webhook(url=f"https://me:{SECRET}@x.org"), "sinks.ops.url: given ***, expected a URL without"),
        (webhook(url=f"https://x.org/a b?{SECRET}"), "sinks.ops.url: given ***, expected a URL such as"),
        (webhook(bearer_token=""), "sinks.ops.bearer_token: given ***, expected a token"),
        (webhook(headers=SECRET), "sinks.ops.headers: given ***, headers, line 1: expected `Name: value`"),
        (webhook(headers={"a b": SECRET}), "sinks.ops.headers: given ***, headers, line 1: expected"),
        (webhook(headers={"X-A": SECRET, "X-B": 5}), "sinks.ops.headers: given ***, expected a text"),
        (webhook(headers={"X-A": f"{SECRET}\nX-B"}), "sinks.ops.headers: given ***, headers, line 2: exp"),
        (webhook(headers={"X-A": f"€{SECRET}"}), "sinks.ops.headers: given ***, headers, line 1: expected"),
        (webhook(signing_secrets=[]), "sinks.ops.signing_secrets: given ***, expected at least one"),
        (
            webhook(kind="servicebus", url=None, queue="q", connection_string=SECRET),
            "sinks.ops.connection_string: expected Endpoint=sb:",
        ),
        (webhook(kind="webhok"), 'sinks.ops.kind: given "webhok", expected one of '),
        (webhook(mode="binari"), f'sinks.ops.mode: given "binari", expected {MODES}'),
        (webhook(types="io.*"), 'sinks.ops.types: given "io.*", expected a list, for example ["a", "b"]'),
        (
            webhook(where={"a": ["x", ["y"]]}),
            'sinks.ops.where.a: given ["x", ["y"]], expected a text, a number, true or false, or a list of them',
        ),
        (webhook(timeout_seconds=0), "sinks.ops.timeout_seconds: given 0, expected greater than 0"),
        (webhook(haeders={"X-Key": SECRET}), "sinks.ops.haeders: unknown key; did you mean headers?"),
        (
            webhook(bearer_token=f"top {SECRET}"),
            "sinks.ops.bearer_token: given ***, expected a token: one word of ASCII letters, digits and signs",
        ),
        (webhook(url=f"http://x.org/?{SECRET}"), f"sinks.ops.url: given ***, {HTTPS}"),
        (
            webhook(types=["scheduledevent.*"]),
            'sinks.ops.types[0]: given "scheduledevent.*", expected existing event types; '
            "did you mean io.imdsbridge.scheduledevent.*?",
        ),
        (stdout(url=f"https://{SECRET}"), "sinks.ops.url: unknown key"),
        (webhook(types=[]), "sinks.ops.types: given [], expected at least one value"),
        (
            webhook(where={"a": {"b": 1}}),
            'sinks.ops.where.a: given {"b": 1}, expected no table; the name of an',
        ),
        (
            "[approvals.auto]\ngroup = true",
            'approvals.auto: given {"group": true}, expected tables: [[approvals.auto]]',
        ),
        (
            '[approvals]\nnamespace = "contoso"\nqueue = "a"',
            'approvals.namespace: given "contoso", expected NAME.',
        ),
        (webhook(where={"a": []}), "sinks.ops.where.a: given [], expected a text"),
        (
            webhook(allow_http="perhaps"),
            'sinks.ops.allow_http: given "perhaps", expected true or false',
        ),
        ("stop_seconds = 'soon'", 'stop_seconds: given "soon", expected a number'),
        ("stop_seconds = [3]", "stop_seconds: given [3], expected a valid number"),
        (
            f"{AUTO}\nmax_unavailable = 1.5",
            "approvals.auto[0].max_unavailable: given 1.5, expected a valid int",
        ),
        (webhook(max_age_seconds=-1), "sinks.ops.max_age_seconds: given -1, expected greater than 0"),
        # First mistakes are told with what to do.
        (
            f'[imds]\nendpoint = "{ENDPOINT}?api-version=2020-07-01"',
            f'imds.endpoint: given "{ENDPOINT}?***", expected the address alone, such as '
            "http://169.254.169.254: the rest is added",
        ),
        (webhook(format="teams", url=TEAMS), RETIRED),
        (webhook(format="teams", url="https://webhook.office.com:443/webhookb2/1"), RETIRED),
        (webhook(format="teams", url=OLD_TEAMS), RETIRED),
        (webhook(format="teams", url=OLD_TEAMS.replace("office.com", "office365.com:443")), RETIRED),
        (webhook(format="teams", url=OLD_TEAMS.replace("outlook", "Outlook")), RETIRED),
        (webhook(format="slack", url=DISCORD), SLACK),
        (webhook(format="slack", url=DISCORD.replace("discord", "ptb.discord") + "?wait=true"), SLACK),
        (
            webhook(format="discord", url=DISCORD),
            'sinks.ops.format: given "discord", expected one of cloudevents, pagerduty, slack, teams, template; '
            'Discord takes "slack" at the URL of its webhook with /slack at the end',
        ),
        (
            '[metrics]\nlisten = "http://127.0.0.1:9464"',
            f'metrics.listen: given "http://127.0.0.1:9464", {A_PORT}, no URL, '
            "for example 127.0.0.1:9464 or [::1]:9464",
        ),
        (
            webhook(bearer_token=SECRET, headers={"authorization": "Bearer b"}),
            "sinks.ops.headers: given Authorization beside bearer_token, which writes it; expected one of them",
        ),
        (
            webhook(url=f"https://x.org/?{SECRET}", url_file="ops-url"),
            'sinks.ops.url_file: given "ops-url", expected either the value or its file, not both',
        ),
        *(
            pytest.param(
                webhook(url=None, url_file=name),
                f'sinks.ops.url_file: given "{name}", {NO_FILE}{end}',
                marks=POSIX,
            )
            for name, end in (
                ("/secrets/ops-url", ""),
                ("/etc/imds-bridge/absent/url_2", ""),
                ("ops-url", "; it was looked for in {folder}/config.secrets and {folder}/secrets"),
            )
        ),
    ],
)
def test_an_error_shows_the_given_value_and_the_expected_one(tmp_path: Path, text: str, start: str) -> None:
    assert fault(tmp_path, text).startswith(start.replace("{folder}", str(tmp_path)))


TABLES: dict[str, dict[str, Any]] = {
    "sinks.ops": {"kind": "webhook", "url": "https://example.org"},
    "sinks.bus": {"kind": "servicebus", "queue": "q", "namespace": "contoso.servicebus.windows.net"},
    "console.ingest": {},
    "approvals": {"auto": [{}]},
}


@pytest.mark.parametrize("name", ["signing_secret", "signing_secrets"])
@pytest.mark.parametrize(
    ("table", "given", "told"),
    [
        ("sinks.bus", {"": SECRET}, "{}: unknown key"),
        ("sinks.bus", {"_file": "x"}, "{}_file: unknown key"),
        ("sinks.ops", {"": 5}, "{}: given ***, expected a text"),
        ("sinks.ops", {"_file": "ops-key"}, '{}_file: given "ops-key", expected a file'),
        (
            "sinks.ops",
            {"": SECRET, "_file": "ops-key"},
            '{}_file: given "ops-key", expected either the value or its',
        ),
        *((table, {"": SECRET}, "{}: given ***, expected whsec_") for table in TABLES if "bus" not in table),
    ],
)
def test_an_error_names_a_signing_secret_as_it_was_written(
    tmp_path: Path, name: str, table: str, given: dict[str, Any], told: str
) -> None:
    tables: Any = {**TABLES[table], **{f"{name}{end}": value for end, value in given.items()}}
    for key in reversed(table.split(".")):
        tables = {key: tables}
    assert fault(tmp_path, toml(tables)).startswith(f"{table}.{told.replace('{}', name)}")


@pytest.mark.parametrize("more", ["", "_file"])
def test_a_signing_secret_in_both_spellings_is_an_error(tmp_path: Path, more: str) -> None:
    file = tmp_path / "secret"
    file.write_text("whsec_" + "QUJD" * 8)
    given = {"signing_secrets_file": file, f"signing_secret{more}": file if more else file.read_text()}
    told = "sinks.ops.signing_secret: expected only one of signing_secrets and signing_secret"
    assert faults(tmp_path, webhook(**given)) == [told]


def test_a_long_value_is_shortened(tmp_path: Path) -> None:
    assert len(fault(tmp_path, toml({"log_level": "x" * 10_000}))) < 200


@pytest.mark.parametrize("key", ["a[b", "[", "a[1]b", "x].[y", "\x1b[31m"])
def test_an_error_about_a_key_with_brackets_is_reported(tmp_path: Path, key: str) -> None:
    assert fault(tmp_path, f"{json.dumps(key)} = 1").endswith("unknown key")


SAVE = "Set-Content -Encoding utf8"
RULES = "[[approvals.auto]]\ngroup = true\n[approvals.policy]\nallow = [{}, { event_typ = 'x' }]"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[[approvals.auto]]\nevent_typ = ['x']", ["approvals.auto[0].event_typ: did you mean event_type?"]),
        (RULES, ["approvals.policy.allow[1].event_typ: did you mean event_type?"]),
        (
            "[imds]\nlog_level = 'x'",
            ["imds.log_level: expected endpoint, api_version, poll_seconds, vm_name"],
        ),
        ("poll_seconds = 2", ["poll_seconds: unknown key"]),  # stop_seconds is not meant
        (
            "[[approvals.auto]]\ntimeout_seconds = 5",
            ["approvals.auto[0].timeout_seconds: did you mean run_timeout_seconds?"],
        ),
        ("[metrics]\nport = 9464", ["metrics.port: expected listen, next_port"]),
        (stdout(scop="all", zzz=1), ["sinks.ops.scop: did you mean scope?", "sinks.ops.zzz: unknown key"]),
    ],
)
def test_an_unknown_key_is_compared_with_those_of_its_table(
    tmp_path: Path, text: str, expected: list[str]
) -> None:
    assert [fault.replace(" unknown key;", "") for fault in faults(tmp_path, text)] == expected


def test_errors_of_settings_together_are_reported_at_once_where_each_is_right_alone(tmp_path: Path) -> None:
    approvals = '[approvals]\nnamespace = "a b"\nhttp_proxy = "http://proxy"\n'
    sink = webhook(client_key_file="/does/not/exist", ca_file="/does/not/exist")
    found = faults(tmp_path, f"{sink}\n{approvals}")
    of_the_sink = ["sinks.ops.client_key_file", "sinks.ops.ca_file"]
    of_the_bus = ["approvals.namespace", "approvals", "approvals.http_proxy"]
    assert [fault.partition(":")[0] for fault in found] == of_the_sink + of_the_bus


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "the file does not exist"),
        (b"\xff\xfe", "cannot be read"),
        ("[metrics]".encode("utf-16"), f"expected UTF-8 text, but it is UTF-16: save it with {SAVE}"),
        (b"log_level = debug", '; a text needs quotes: kind = "webhook"'),
        (b"[imds\npoll = 1", "is not valid TOML: .*line 1"),
    ],
)
def test_a_file_given_with_config_must_exist_and_be_valid_toml(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "config.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as raised:
        load(path, {})
    assert raised.value.source == str(path)


def test_a_file_that_the_user_may_not_read_is_named_without_a_number_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ConfigError) as raised:
        load(tmp_path / "config.toml", {})
    assert raised.value.faults == ["this user may not read it; use sudo, or another file"]


def test_a_folder_is_no_configuration(tmp_path: Path) -> None:
    # Windows says of a folder that it may not be read.
    with pytest.raises(ConfigError, match=r"cannot be read|may not read it"):
        load(tmp_path, {})


def test_what_editors_of_windows_write_is_read_or_explained(tmp_path: Path) -> None:
    assert read(tmp_path, "\ufeffstop_seconds = 7\n").stop_seconds == 7
    for folder in (r"C:\ProgramData\x", r"C:\Users\x"):
        assert "in single quotes" in fault(tmp_path, f'state_dir = "{folder}"\n')
        assert str(read(tmp_path, f"state_dir = '{folder}'\n").state_dir) == folder


# Each format brings its own settings: defaults, required ones, and limits


def test_another_kind_may_have_formats_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.SINK_KINDS, "other", registry.SINK_KINDS["webhook"])
    for name in FORMATS:
        settings = registry.format_class(name).settings
        assert registry.sink_settings({"kind": "other", "format": name}) is settings


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_has_its_own_defaults_and_the_limits_of_every_sink(tmp_path: Path, name: str) -> None:
    row = ROWS[name]
    sink = read(tmp_path, webhook(format=name, **row.needed)).sinks["ops"]
    assert (sink.types, sink.max_age_seconds) == (row.types, row.age_seconds)
    assert (sink.max_per_second, sink.is_chat_format) == (row.per_second, row.is_chat_format)
    found = faults(tmp_path, webhook(format=name, max_per_second=1e-11, max_age_seconds=-1, **row.needed))
    assert {fault.partition(":")[0] for fault in found} == {
        "sinks.ops.max_age_seconds",
        "sinks.ops.max_per_second",
    }


@pytest.mark.parametrize(
    ("settings", "start", "end"),
    [
        ({"format": "pagerduty"}, "routing_key: is missing (or routing_key_file)", ""),
        ({"format": "template"}, "template: is missing (or template_file)", ""),
        (
            {"format": "teams", "routing_key": "x"},
            "routing_key: ",
            "unknown key",
        ),
        (
            {"format": "slack", "mode": "x"},
            "mode: ",
            "unknown key",
        ),
        ({"content_type": "json\r\nX: y"}, "content_type: ", "^([!-~]+/[ -~]+)?$'"),
        ({"template_file": "x"}, "template_file: ", "unknown key"),
        (
            {"format": "teams", "time_zone": "Europe/Berln"},
            "time_zone: ",
            "IANA time zone such as Europe/Berlin",
        ),
        ({"where": {"AffectsThisVm": "yes"}}, "where.AffectsThisVm: ", 'given "yes", expected true or false'),
        ({"ca_file": "/etc/nothing.pem"}, "ca_file: ", "No such file or directory"),
        (
            {"format": "team"},
            'format: given "team", expected one of cloudevents, ',
            "; did you mean teams?",
        ),
    ],
)
def test_a_missing_or_foreign_setting_and_an_unknown_format_are_named(
    tmp_path: Path, settings: dict[str, Any], start: str, end: str
) -> None:
    found = fault(tmp_path, webhook(**settings))
    assert found.startswith(f"sinks.ops.{start}")
    assert found.endswith(end)


# Secrets


@pytest.mark.parametrize(
    "secret",
    [
        "Endpoint=sb://contoso.servicebus.windows.net/;SharedAccessKeyName=n;SharedAccessKey=c2VjcmV0",
        "https://example.org/hook/c2VjcmV0?sig=c2VjcmV0",
        "/c2VjcmV0",
        "c2Vj/cmV0+c2VjcmV0==",
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        "-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----",
        "c2VjcmV0" * 1000,
        "c2Vj\0cmV0",
    ],
)
@pytest.mark.parametrize(
    "name", ["url", "bearer_token", "headers", "proxy", "signing_secret", "ca", "client_certificate"]
)
def test_a_secret_in_place_of_a_files_name_is_not_shown(tmp_path: Path, name: str, secret: str) -> None:
    for value in (secret, [secret]):
        given: dict[str, Any] = {"url": None} if name == "url" else {}
        found = str(faults(tmp_path, webhook(**given, **{f"{name}_file": value})))
        assert f"{name}_file" in found
        assert "c2Vj" not in found
        assert "MfKQ" not in found


def test_a_digest_that_no_relay_makes_is_told(tmp_path: Path) -> None:
    sink = webhook(format="teams", digest_seconds=60)
    found = only(warnings(read(tmp_path, sink)))
    assert found[1] == "sinks.ops.digest_seconds: only a relay gathers messages, and there is no [relay]"
    relay = f"[relay]\n{BUS.partition(chr(10))[2]}topic = 'events'\nsubscription = 'relay'\n"
    assert not [*warnings(read(tmp_path, f"{sink}\n{relay}"))]
    assert not [*warnings(read(tmp_path, webhook(format="teams")))]


@pytest.mark.parametrize("url", [f"{DISCORD}/slack", f"{DISCORD}/slack?wait=true", "https://example.org/x"])
def test_what_discord_takes_is_accepted(tmp_path: Path, url: str) -> None:
    read(tmp_path, webhook(format="slack", url=url))
    read(tmp_path, webhook(format="template", url=DISCORD, template={"content": "x"}))


@pytest.mark.parametrize(
    ("variable", "is_told"),
    [
        ("IMDS_BRIDGE_SINKS_OPS_URL", True),
        ("imds_bridge_metrics_listen", True),
        ("IMDS_BRIDGE_IMDS_ENDPOINT", True),
        *((name, False) for name in ("IMDS_BRIDGE_EVENT_ID", "IMDS_BRIDGE_RESOURCES", "IMDS_BRIDGE_BOOT_ID")),
        # Kubernetes makes these of services called imds-bridge-relay and imds-bridge-metrics.
        *((f"IMDS_BRIDGE_RELAY_{name}", False) for name in ("SERVICE_HOST", "PORT", "PORT_9464_TCP_ADDR")),
        ("IMDS_BRIDGE_METRICS_SERVICE_PORT_HTTP", False),
    ],
)
def test_a_variable_with_single_underscores_is_told(tmp_path: Path, variable: str, is_told: bool) -> None:
    expected = "expected IMDS_BRIDGE__SECTION__KEY with two underscores, such as IMDS_BRIDGE__SINKS__OPS__URL"
    if is_told:
        assert faults(tmp_path, "", {variable: SECRET}) == [
            f"the environment variable {variable}: {expected}"
        ]
    else:
        read(tmp_path, "", {variable: SECRET})


@pytest.mark.parametrize(("path", "is_shown"), [("C:\\secrets\\x", True), ("c2Vj:\\cmV0", False)])
def test_the_path_of_a_missing_file_on_windows_is_shown(path: str, is_shown: bool) -> None:
    assert (quote_path(Path(path)) == json.dumps(path)) is is_shown


def test_a_secret_file_that_is_empty_or_not_text_is_an_error(tmp_path: Path) -> None:
    token = tmp_path / "token"
    for content, expected in (
        (b" \n", f"text in {token}, which is empty"),
        (b"\xff" + SECRET.encode(), f"UTF-8 text in {token}"),
        (SECRET.encode("utf-16"), f"UTF-8 text in {token}, but it is UTF-16: save it with {SAVE}"),
    ):
        token.write_bytes(content)
        assert faults(tmp_path, webhook(bearer_token_file=token)) == [
            f"sinks.ops.bearer_token_file: given {json.dumps(str(token))}, expected {expected}"
        ]


def test_a_secret_is_never_shown_and_its_file_is_read_again_on_each_use(tmp_path: Path) -> None:
    url = Secret("https://example.org")
    settings = WebhookSettings(kind="webhook", format="any", url=url, bearer_token=Secret(SECRET))
    assert SECRET not in repr(Secret(SECRET)) + repr(settings) + str(settings)
    file = tmp_path / "secret"
    secret = Secret(file=file)
    for content in (" one \n", "two"):
        file.write_text(content)
        assert secret.read() == content.strip()


# The pieces


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        ("127.0.0.1:9464", (AF_INET, ("127.0.0.1", 9464))),
        ("[::1]:0", (AF_INET6, ("::1", 0))),
        ("10.0.0.4:65535", (AF_INET, ("10.0.0.4", 65535))),
    ],
)
def test_an_address_is_read(
    tmp_path: Path, listen: str, address: tuple[AddressFamily, tuple[str, int]]
) -> None:
    assert socket_address(read(tmp_path, f'[metrics]\nlisten = "{listen}"').metrics.listen) == address


URLS = ("https://x", "https://[::1]:1/a?b=c", "http://127.0.0.1:1", "http://localhost/", "http://[::1]/")
NO_URLS = ("", "x", "//x", "https://", "https:///x", "ftp://x", "https://x:port", "https://x:99999")
ODD_URLS = ("https://[::1", " https://x", "https://x\n", "https://x/\ty", "https://x/é")


@pytest.mark.parametrize("url", [*URLS, *NO_URLS, *ODD_URLS, "http://10.0.0.1", "http://127.0.0.1.evil"])
def test_https_anywhere_and_plain_http_to_this_machine_are_accepted_and_nothing_else(url: str) -> None:
    with nullcontext() if url in URLS else pytest.raises(ValueError, match="expected"):
        assert check_url(url, allow_http=False) == url


def test_headers_are_one_per_line_and_comments_are_ignored() -> None:
    text = "# comment\n\nX-One: 1: and more\n  X-Two:2  \nX_Three:\n"
    assert parse_headers(text) == {"X-One": "1: and more", "X-Two": "2", "X_Three": ""}


# AMQP without TLS goes to this machine only, unless the configuration says otherwise

KEY = "SharedAccessKeyName=a;SharedAccessKey=c2VjcmV0"
PLAIN = "UseDevelopmentEmulator=true"


@pytest.mark.parametrize(
    "text",
    [
        f"Endpoint=sb://bus.example;{KEY};{PLAIN};",
        f"Endpoint=sb://bus.example:5672/;{KEY};{PLAIN}",
        f"{PLAIN};Endpoint=sb://192.0.2.1;{KEY}",
        f"Endpoint=sb://bus.example;{KEY}; usedevelopmentemulator = TRUE ;",
        f"Endpoint=sb://localhost.example;{KEY};{PLAIN}",
    ],
)
@pytest.mark.parametrize("settings", [ReceiverSettings, ServiceBusSettings])
def test_plain_amqp_to_another_machine_is_refused_unless_it_is_allowed(
    settings: type[ReceiverSettings] | type[ServiceBusSettings], text: str
) -> None:
    given = {"queue": "q", "connection_string": text}
    if settings is ServiceBusSettings:
        given["kind"] = "servicebus"
    with pytest.raises(ValueError, match="allow_http = true") as caught:
        settings.model_validate(given)
    assert "c2VjcmV0" not in str(caught.value).partition("[type=")[0]
    assert settings.model_validate({**given, "allow_http": True})


@pytest.mark.parametrize(
    "text",
    [
        f"Endpoint=sb://127.0.0.1:5672;{KEY};{PLAIN};",
        f"Endpoint=sb://localhost;{KEY};{PLAIN};",
        f"Endpoint=sb://[::1]:5672;{KEY};{PLAIN};",
        f"Endpoint=sb://bus.example;{KEY}",
        f"Endpoint=sb://bus.example;{KEY};UseDevelopmentEmulator=false",
    ],
)
def test_plain_amqp_to_this_machine_and_tls_to_any_are_accepted(text: str) -> None:
    assert ReceiverSettings(queue="q", connection_string=Secret(text))


def test_a_connection_string_that_becomes_plain_while_running_is_not_used(tmp_path: Path) -> None:
    file = tmp_path / "connection"
    file.write_text(f"Endpoint=sb://bus.example;{KEY}")
    settings = ReceiverSettings(queue="q", connection_string=Secret(file=file))
    file.write_text(f"Endpoint=sb://bus.example;{KEY};{PLAIN}")
    with pytest.raises(Misconfigured, match="allow_http = true") as caught:
        connect(settings)
    assert "c2VjcmV0" not in str(caught.value)
