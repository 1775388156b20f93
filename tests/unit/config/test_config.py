"""The configuration: every error at once, and no secret in any of them."""

from __future__ import annotations

import json
from pathlib import Path
from socket import AF_INET, AF_INET6, AddressFamily

import pytest

from bridge.config import loader as loader_module
from bridge.config.base import Secret
from bridge.config.loader import DEFAULT_PATH, load
from bridge.config.models import Config
from bridge.config.sinks import StdoutSettings, WebhookSettings
from bridge.config.values import check_url, parse_headers, socket_address
from bridge.errors import ConfigError
from bridge.formats.cloudevents import CloudEventsSettings
from tests.support.process import toml
from tests.support.settings import SECRET, faults, read, stdout, webhook


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def mode_of(config: Config) -> str:
    sink = only_sink(config)
    assert isinstance(sink, CloudEventsSettings)
    return sink.mode


def only_sink(config: Config) -> WebhookSettings:
    (sink,) = config.sinks.values()
    assert isinstance(sink, WebhookSettings)
    return sink


# --- what may be given ---


def test_the_example_of_the_design_is_read(file: Path, tmp_path: Path) -> None:
    url = tmp_path / "url"
    url.write_text("https://example.org/teams?sig=abc\n")
    config = read(
        file,
        f"""
        state_dir = "/var/lib/imds-bridge"
        [imds]
        endpoint = "http://169.254.169.254"
        api_version = "2020-07-01"
        poll_seconds = 1.0
        [sinks.ops]
        kind = "webhook"
        url_file = "{url}"
        types = ["io.imdsbridge.scheduledevent.*"]
        where = {{ EventType = ["Reboot", "Redeploy", "Preempt", "Terminate"] }}
        max_age_seconds = 3600
        [sinks.screen]
        kind = "stdout"
        """,
    )
    ops, screen = config.sinks["ops"], config.sinks["screen"]
    assert isinstance(ops, WebhookSettings)
    assert isinstance(screen, StdoutSettings)
    assert ops.url.read() == "https://example.org/teams?sig=abc"
    assert list(ops.where["EventType"]) == ["Reboot", "Redeploy", "Preempt", "Terminate"]
    assert (ops.max_age_seconds, screen.max_age_seconds) == (3600, 7 * 86_400)


def test_with_no_file_at_all_everything_has_its_default(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    monkeypatch.setattr(loader_module, "DEFAULT_PATH", file)
    config = load(None, {})
    assert dict(config.sinks) == {}
    assert (config.imds.endpoint, config.imds.poll_seconds, config.stop_seconds) == (
        "http://169.254.169.254",
        1.0,
        5.0,
    )
    assert (config.max_outbox_mb, config.retain_seconds) == (1024, 7 * 86_400)
    assert str(DEFAULT_PATH) == "/etc/imds-bridge/config.toml"


def test_the_default_file_is_read_if_it_exists(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    monkeypatch.setattr(loader_module, "DEFAULT_PATH", file)
    file.write_text("stop_seconds = 9")
    assert load(None, {}).stop_seconds == 9


# --- the environment ---


def test_the_environment_alone_is_enough(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    monkeypatch.setattr(loader_module, "DEFAULT_PATH", file)
    config = load(
        None,
        {
            "IMDS_BRIDGE__STATE_DIR": "/state",
            "IMDS_BRIDGE__IMDS__POLL_SECONDS": "2.5",
            "IMDS_BRIDGE__SINKS__OPS__KIND": "webhook",
            "IMDS_BRIDGE__SINKS__OPS__URL": "https://example.org/{event}",
            "IMDS_BRIDGE__SINKS__OPS__TYPES": '["io.imdsbridge.document.*", "io.imdsbridge.imds.*"]',
            "IMDS_BRIDGE__SINKS__OPS__WHERE": '{"EventType": ["Reboot"], "AffectsThisVm": true}',
            "IMDS_BRIDGE__SINKS__OPS__HEADERS": '{"X-Key": "abc"}',
            "IMDS_BRIDGE__SINKS__OPS__FROM_START": "true",
            "IMDS_BRIDGE__SINKS__AUDIT": '{"kind": "stdout"}',
        },
    )
    ops = config.sinks["ops"]
    assert isinstance(ops, WebhookSettings)
    assert (str(config.state_dir), config.imds.poll_seconds) == ("/state", 2.5)
    assert ops.types == ("io.imdsbridge.document.*", "io.imdsbridge.imds.*")
    assert ops.where == {"EventType": ["Reboot"], "AffectsThisVm": True}
    assert ops.headers is not None
    assert parse_headers(ops.headers.read()) == {"X-Key": "abc"}
    assert ops.from_start is True
    assert config.sinks["audit"].kind == "stdout"


def test_the_environment_overrides_the_file_key_by_key(file: Path) -> None:
    text = toml({"imds": {"poll_seconds": 2, "api_version": "2019-08-01"}}) + webhook(mode="binary")
    config = read(
        file,
        text,
        {
            "IMDS_BRIDGE__IMDS__POLL_SECONDS": "3",
            "IMDS_BRIDGE__SINKS__OPS__URL": "https://other.example.org",
            "imds_bridge__stop_seconds": "8",
        },
    )
    assert (config.imds.poll_seconds, config.imds.api_version) == (3, "2019-08-01")
    assert only_sink(config).url.read() == "https://other.example.org"
    assert mode_of(config) == "binary"
    assert config.stop_seconds == 8


def test_the_environment_finds_a_sink_whose_name_has_capital_letters(file: Path) -> None:
    text = toml({"sinks": {"OpsRoom": {"kind": "webhook", "url": "https://example.org"}}})
    config = read(file, text, {"IMDS_BRIDGE__SINKS__OPSROOM__MODE": "binary"})
    assert list(config.sinks) == ["OpsRoom"]
    assert mode_of(config) == "binary"


def test_a_secret_of_the_environment_replaces_a_file_and_a_file_a_secret(file: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("from-the-file\n")
    name = "IMDS_BRIDGE__SINKS__OPS__BEARER_TOKEN"
    config = read(file, webhook(bearer_token_file=token), {name: "from-the-environment"})
    assert only_sink(config).bearer_token == Secret("from-the-environment")
    config = read(file, webhook(bearer_token="in-the-clear"), {f"{name}_FILE": str(token)})  # noqa: S106
    assert only_sink(config).bearer_token == Secret(file=token)


def test_variables_with_a_single_underscore_are_not_settings(file: Path) -> None:
    kubernetes = {"IMDS_BRIDGE_PORT": "tcp://10.0.0.1:80", "IMDS_BRIDGE_SERVICE_HOST": "10.0.0.1"}
    assert read(file, "", kubernetes) == read(file, "")


def test_an_error_in_the_environment_names_the_variable(file: Path) -> None:
    found = faults(
        file,
        "",
        {
            "IMDS_BRIDGE__STOP_SECONDS": "soon",
            "IMDS_BRIDGE__IMDS__POL_SECONDS": "1",
            "IMDS_BRIDGE__SINKS__A": '{"kind": "webhook", "url": "https://x", "mode": "binari"}',
            "IMDS_BRIDGE__SINKS__B": f'{{"kind": "webhook", "url": "https://x?sig={SECRET}"',
            "IMDS_BRIDGE__SINKS__C__KIND": "webhook",
            "IMDS_BRIDGE__SINKS__C__URL_FILE": "/does/not/exist",
        },
    )
    by_key = {fault.partition(":")[0]: fault for fault in found}
    assert set(by_key) == {
        "stop_seconds",
        "imds.pol_seconds",
        "sinks.a.mode",
        "sinks.b",
        "sinks.c.url_file",
    }
    for key, variable in (
        ("stop_seconds", "IMDS_BRIDGE__STOP_SECONDS"),
        ("imds.pol_seconds", "IMDS_BRIDGE__IMDS__POL_SECONDS"),
        ("sinks.a.mode", "IMDS_BRIDGE__SINKS__A"),
        ("sinks.b", "IMDS_BRIDGE__SINKS__B"),
        ("sinks.c.url_file", "IMDS_BRIDGE__SINKS__C__URL_FILE"),
    ):
        assert by_key[key].endswith(f"(from the environment variable {variable})")


@pytest.mark.parametrize("key", ["a[b", "[", "a[1]b", "x].[y", "\x1b[31m"])
def test_an_error_about_a_key_with_brackets_is_reported(file: Path, key: str) -> None:
    (found,) = faults(file, f"{json.dumps(key)} = 1")
    assert found.endswith("unknown key")


# --- faults ---


def test_a_size_that_no_disk_has_is_refused(file: Path) -> None:
    assert faults(file, "max_outbox_mb = 1e308") == [
        "max_outbox_mb: given 1e+308, expected less than or equal to 1000000"
    ]


def test_all_errors_are_reported_at_once_each_with_the_given_value_and_the_expected_one(file: Path) -> None:
    found = faults(
        file,
        f"""
        log_levl = "info"
        stop_seconds = 9999
        source = "two words"
        max_outbox_mb = inf
        [imds]
        endpoint = "http://user:{SECRET}@1.2.3.4"
        poll_second = 3
        api_version = "latest"
        [sink.x]
        [sinks.a]
        kind = "webhok"
        [sinks.b]
        kind = "webhook"
        url_file = "/does/not/exist"
        mode = "binari"
        types = "io.imdsbridge.*"
        where = {{ EventType = ["Reboot", ["Redeploy"]] }}
        timeout_seconds = 0
        haeders = {{ X-Key = "{SECRET}" }}
        bearer_token = "top {SECRET}"
        [sinks.c]
        kind = "webhook"
        url = "http://example.org/?sig={SECRET}"
        types = ["scheduledevent.*"]
        [sinks.d]
        kind = "stdout"
        url = "https://{SECRET}"
        """,
    )
    (kind,) = [fault for fault in found if fault.startswith("sinks.a")]
    assert kind.startswith('sinks.a.kind: given "webhok", expected one of ')
    assert kind.endswith("; did you mean webhook?")
    versions = (
        "'2017-03-01', '2017-08-01', '2017-11-01', '2019-01-01', '2019-04-01', '2019-08-01' or '2020-07-01'"
    )
    assert sorted(found) == sorted(
        [
            "log_levl: unknown key; did you mean log_level?",
            "stop_seconds: given 9999, expected less than or equal to 600",
            "source: given \"two words\", expected a text that matches pattern '^[!-~]*$'",
            "max_outbox_mb: given Infinity, expected a finite number",
            'imds.endpoint: given "http://***@1.2.3.4", expected a URL without user and password; '
            "use bearer_token or headers",
            "imds.poll_second: unknown key; did you mean poll_seconds?",
            f'imds.api_version: given "latest", expected {versions}',
            "sink: unknown key; did you mean sinks?",
            kind,
            "sinks.b.url_file: given a name that is not shown because it may be a secret, "
            "expected a file that can be read: No such file or directory",
            "sinks.b.mode: given \"binari\", expected 'structured', 'binary' or 'batch'",
            'sinks.b.types: given "io.imdsbridge.*", expected a list, for example ["a", "b"]',
            'sinks.b.where.EventType: given ["Reboot", ["Redeploy"]], '
            "expected a text, a number, true or false, or a list of them",
            "sinks.b.timeout_seconds: given 0, expected greater than 0",
            "sinks.b.haeders: unknown key; did you mean headers?",
            "sinks.b.bearer_token: given ***, expected a token: one word of ASCII letters, digits and signs",
            "sinks.c.url: given ***, expected https; set allow_http = true to send without encryption",
            'sinks.c.types[0]: given "scheduledevent.*", expected existing event types; '
            "did you mean io.imdsbridge.scheduledevent.*?",
            'sinks.d.url: unknown key; did you mean sinks.NAME.url with kind = "webhook"?',
        ]
    )


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("sinks = 5", "sinks: expected tables such as [sinks.ops]"),
        (f'sinks = "{SECRET}"', "sinks: expected tables such as [sinks.ops]"),
        (f'[sinks]\nops = "{SECRET}"', "sinks.ops: given a text, expected a table: [sinks.ops]"),
        ("imds = 5", "imds: given 5, expected a table"),
        ('[sinks.ops]\nurl = "x"', "sinks.ops.kind: given null, expected one of "),
        ("state_dir = 5", "state_dir: given 5, expected a path"),
        ("[imds]\npoll_seconds = 0.1", "imds.poll_seconds: given 0.1, expected greater than or equal to 0.2"),
        ("[imds]\npoll_seconds = nan", "imds.poll_seconds: given NaN, expected"),
        ('[imds]\nendpoint = "169.254.169.254"', 'imds.endpoint: given "169.254.169.254", expected a URL'),
        ("metrics = 5", "metrics: given 5, expected a table"),
        ('[metrics]\nlisten = "9464"', 'metrics.listen: given "9464", expected an address and a port'),
        ('[metrics]\nlisten = ":9464"', 'metrics.listen: given ":9464", expected an address and a port'),
        (
            '[metrics]\nlisten = "::1:66000"',
            'metrics.listen: given "::1:66000", expected an address and a port',
        ),
        (webhook(url=None), "sinks.ops.url: is missing (or url_file)"),
        (webhook(url=5), "sinks.ops.url: given ***, expected a text"),
        (webhook(url=f"{SECRET}.example.org"), "sinks.ops.url: given ***, expected a URL such as"),
        (webhook(url=f"https://me:{SECRET}@example.org"), "sinks.ops.url: given ***, expected a URL without"),
        (
            webhook(url=f"https://example.org/a b?{SECRET}"),
            "sinks.ops.url: given ***, expected a URL such as",
        ),
        (webhook(bearer_token=""), "sinks.ops.bearer_token: given ***, expected a token"),
        (webhook(headers=SECRET), "sinks.ops.headers: given ***, headers, line 1: expected `Name: value`"),
        (webhook(headers={"a b": SECRET}), "sinks.ops.headers: given ***, headers, line 1: expected"),
        (
            webhook(headers={"X-A": f"{SECRET}\nX-B"}),
            "sinks.ops.headers: given ***, headers, line 2: expected",
        ),
        (webhook(headers={"X-A": f"€{SECRET}"}), "sinks.ops.headers: given ***, headers, line 1: expected"),
        (webhook(types=[]), "sinks.ops.types: given [], expected at least one value"),
        (webhook(where={"a": {"b": 1}}), 'sinks.ops.where.a: given {"b": 1}, expected a text'),
        (webhook(where={"a": []}), "sinks.ops.where.a: given [], expected a text"),
        (webhook(allow_http="perhaps"), 'sinks.ops.allow_http: given "perhaps", expected a valid boolean'),
        (webhook(max_age_seconds=-1), "sinks.ops.max_age_seconds: given -1, expected greater than 0"),
    ],
)
def test_an_error_shows_the_given_value_and_the_expected_one(file: Path, text: str, fault: str) -> None:
    (found,) = faults(file, text)
    assert found.startswith(fault)


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        ("127.0.0.1:9464", (AF_INET, ("127.0.0.1", 9464))),
        ("[::1]:0", (AF_INET6, ("::1", 0))),
        ("10.0.0.4:65535", (AF_INET, ("10.0.0.4", 65535))),
    ],
)
def test_an_address_to_listen_on_is_read(
    file: Path, listen: str, address: tuple[AddressFamily, tuple[str, int]]
) -> None:
    file.write_text(f'[metrics]\nlisten = "{listen}"')
    assert socket_address(load(file, {}).metrics.listen) == address


def test_a_secret_and_its_file_together_are_an_error(file: Path, tmp_path: Path) -> None:
    name = str(tmp_path / "url")
    assert faults(file, webhook(url=f"https://example.org/?{SECRET}", url_file=name)) == [
        f"sinks.ops.url_file: given {json.dumps(name)}, expected either url or url_file, not both"
    ]


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
    "key",
    [
        *("url_file", "bearer_token_file", "headers_file", "proxy_file", "signing_secret_file"),
        *("ca_file", "client_certificate_file"),
    ],
)
def test_a_secret_in_place_of_a_files_name_is_not_shown(file: Path, key: str, secret: str) -> None:
    for value in (secret, [secret]):
        found = faults(
            file, webhook(**({} if key == "url_file" else {"url": "https://example.org"}), **{key: value})
        )
        assert key in str(found)
        assert "c2Vj" not in str(found)
        assert "MfKQ" not in str(found)


def test_a_secret_file_that_is_empty_or_not_text_is_an_error(file: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    for content, expected in (
        (b" \n", f"text in {token}, which is empty"),
        (b"\xff" + SECRET.encode(), f"UTF-8 text in {token}"),
    ):
        token.write_bytes(content)
        assert faults(file, webhook(bearer_token_file=token)) == [
            f"sinks.ops.bearer_token_file: given {json.dumps(str(token))}, expected {expected}"
        ]


def test_a_file_given_with_config_must_exist_and_be_valid_toml(file: Path, tmp_path: Path) -> None:
    for path, reason in (
        (file, "the file does not exist; expected a TOML file"),
        (tmp_path, "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=reason) as raised:
            load(path, {})
        assert raised.value.source == str(path)
    (bad,) = faults(file, "[imds\npoll = 1")
    assert bad.startswith("is not valid TOML: ")
    assert "line 1" in bad
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(file, {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "[[approvals.auto]]\nevent_typ = ['Reboot']",
            ["approvals.auto[0].event_typ: unknown key; did you mean event_type?"],
        ),
        (
            "[[approvals.auto]]\ngroup = true\n[approvals.policy]\nallow = [{}, { event_typ = 'x' }]",
            ["approvals.policy.allow[1].event_typ: unknown key; did you mean event_type?"],
        ),
        (
            "[imds]\nlog_level = 'info'",
            ["imds.log_level: unknown key; did you mean log_level before the first [table]?"],
        ),
        ("poll_second = 2", ["poll_second: unknown key; did you mean imds.poll_seconds?"]),
        ("[policy]", ["policy: unknown key; did you mean approvals.policy?"]),
        (
            stdout(session="x"),
            ['sinks.ops.session: unknown key; did you mean sinks.NAME.session with kind = "servicebus"?'],
        ),
        (
            stdout(scop="all", zzz=1),
            ["sinks.ops.scop: unknown key; did you mean scope?", "sinks.ops.zzz: unknown key"],
        ),
    ],
)
def test_an_unknown_key_is_compared_with_its_own_table_first_and_then_with_all_others(
    file: Path, text: str, expected: list[str]
) -> None:
    assert faults(file, text) == expected


def test_errors_of_settings_together_are_reported_at_once_where_each_is_right_alone(file: Path) -> None:
    text = """
        [approvals]
        namespace = "a b"
        http_proxy = "http://proxy"
        [sinks.ops]
        kind = "webhook"
        url = "https://example.org"
        client_key_file = "/does/not/exist"
        ca_file = "/does/not/exist"
        """
    rule = """
        [[approvals.policy.allow]]
        min_duration_seconds = 2
        max_duration_seconds = 1
        min_notice_seconds = 2
        max_notice_seconds = 1
        """
    of_the_sink = ["sinks.ops.client_key_file", "sinks.ops.ca_file"]
    assert [fault.partition(":")[0] for fault in faults(file, text)] == [
        *of_the_sink,
        "approvals.namespace",
        "approvals",
        "approvals.http_proxy",
    ]
    assert [fault.partition(":")[0] for fault in faults(file, text + rule)] == [
        *of_the_sink,
        "approvals.policy.allow[0].min_duration_seconds",
        "approvals.policy.allow[0].min_notice_seconds",
    ]


def test_a_faulty_setting_is_not_reported_as_missing_as_well(file: Path) -> None:
    text = '[approvals]\nnamespace = "contoso.servicebus.windows.net"\n'
    assert [fault.partition(",")[0] for fault in faults(file, f"{text}queue = 5")] == [
        "approvals.queue: given 5"
    ]
    assert faults(file, f'{text}qeue = "a"') == ["approvals.qeue: unknown key; did you mean queue?"]


def test_a_long_value_is_shortened(file: Path) -> None:
    (fault,) = faults(file, toml({"log_level": "x" * 10_000}))
    assert len(fault) < 200


# --- the pieces ---


def test_a_secret_is_never_shown() -> None:
    assert SECRET not in repr(Secret(SECRET))
    settings = WebhookSettings(
        kind="webhook", format="any", url=Secret("https://example.org"), bearer_token=Secret(SECRET)
    )
    assert SECRET not in repr(settings) + str(settings)


def test_a_secret_file_is_read_again_on_each_use(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(" one \n")
    secret = Secret(file=file)
    assert secret.read() == "one"
    file.write_text("two")
    assert secret.read() == "two"


@pytest.mark.parametrize(
    "url", ["https://x", "https://[::1]:1/a?b=c", "http://127.0.0.1:1", "http://localhost/", "http://[::1]/"]
)
def test_https_anywhere_and_plain_http_to_this_machine_are_accepted(url: str) -> None:
    assert check_url(url, allow_http=False) == url


@pytest.mark.parametrize(
    "url",
    [
        *(
            "",
            "x",
            "//x",
            "https://",
            "https:///x",
            "ftp://x",
            "https://x:port",
            "https://x:99999",
            "https://[::1",
        ),
        *(
            " https://x",
            "https://x\n",
            "https://x/\ty",
            "https://x/é",
            "http://10.0.0.1",
            "http://127.0.0.1.evil",
        ),
    ],
)
def test_every_other_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        check_url(url, allow_http=False)


def test_headers_are_one_per_line_and_comments_are_ignored() -> None:
    text = "# comment\n\nX-One: 1: and more\n  X-Two:2  \nX_Three:\n"
    assert parse_headers(text) == {"X-One": "1: and more", "X-Two": "2", "X_Three": ""}
