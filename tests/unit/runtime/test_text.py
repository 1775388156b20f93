"""Text from outside controls no terminal, and JSON is read within limits and stays JSON."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.formats.text import table
from bridge.runtime.json import BoundedDecoder, read_object
from bridge.runtime.text import escape, one_line, plain, redact, show
from tests.support.diff import json_values, steady


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", r"\u001b[31mred\u001b[0m"),
        ("one\ntwo\r", r"one\ntwo\r"),
        ("\x9b2J \x7f", r"\u009b2J \u007f"),
        ("\u202egpj.exe", r"\u202egpj.exe"),
        ("\u2028\U000e0041\ud800", r"\u2028\udb40\udc41\ud800"),
        ("Zoë 東京 👍🏽 C:\\new", "Zoë 東京 👍🏽 C:\\new"),
    ],
)
def test_characters_that_control_a_terminal_are_shown_as_escapes(text: str, shown: str) -> None:
    assert escape(text) == shown


@steady
@given(text=st.text())
def test_no_control_character_is_left_and_escaping_again_changes_nothing(text: str) -> None:
    shown = escape(text)
    assert not {"Cc", "Cs", "Zl", "Zp"} & {unicodedata.category(letter) for letter in shown}
    assert not {"RLO", "LRO", "RLE", "LRE", "PDF", "RLI", "LRI", "FSI", "PDI"} & {
        unicodedata.bidirectional(letter) for letter in shown
    }
    assert escape(shown) == shown


@steady
@given(value=json_values(), is_ascii=st.booleans())
def test_json_keeps_its_value(value: object, is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii)
    assert json.dumps(json.loads(escape(text)), ensure_ascii=is_ascii) == text  # NaN is not equal to itself


def test_what_another_says_is_one_line_without_secrets() -> None:
    said = "\x1b[31mno\n\n https://host/path?sig=1\t" + "x" * 1_000
    assert one_line(said) == "[31mno https://host/path?*** " + "x" * 471
    assert one_line(said, 5) == "[31mn"


@pytest.mark.parametrize("folder", ["credentials/imds-bridge-listen.service", "imds-bridge/listen"])
def test_a_unit_names_the_files_of_which_it_has_copies(folder: str) -> None:
    copies = "config.toml secrets_ops-url config.secrets secrets other"
    given = " ".join(f"/run/{folder}/{name}" for name in copies.split())
    names = ("listen.toml", "listen.secrets/ops-url", "listen.secrets", "secrets")
    expected = " ".join(f"/etc/imds-bridge/{name}" for name in names)
    assert redact(given) == plain(given) == f"{expected} /run/{folder}/other"


def test_an_error_of_the_system_has_no_number() -> None:
    given = PermissionError(
        13, "Permission denied", "/run/credentials/imds-bridge-forward.service/secrets_url"
    )
    assert redact(str(given)) == "Permission denied: '/etc/imds-bridge/forward.secrets/url'"


def test_a_line_break_within_a_line_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    show("first", "second\nforged")
    assert capsys.readouterr().out == "first\nsecond\\nforged\n"


def test_the_columns_of_a_table_are_aligned_as_they_are_shown() -> None:
    rows = [("\x1b", "1"), ("long", "2\n3")]
    assert table(("A", "B"), rows) == ["A       B", r"\u001b  1", r"long    2\n3"]


# JSON from outside: what is read, and what is refused with which words

DECODER = BoundedDecoder(max_depth=3)


@pytest.mark.parametrize("value", [1, "x", None, [], {}, {"a": [1]}, {"a": [{"b": 1}]}, [[[]]]])
def test_json_within_the_depth_is_read(value: Any) -> None:
    assert DECODER.decode(json.dumps(value)) == value


@pytest.mark.parametrize("text", ["[[[[]]]]", '{"a": [{"b": []}]}', "[" * 100_000, '{"a":' * 100_000])
@pytest.mark.usefixtures("without_collection")
def test_json_beyond_the_depth_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        DECODER.decode(text)


def test_a_byte_order_mark_is_read_only_where_it_is_allowed() -> None:
    body = b'\xef\xbb\xbf{"a": 1}'
    assert read_object(body, max_bytes=100, decoder=DECODER, encoding="utf-8-sig") == {"a": 1}
    with pytest.raises(ValueError, match="not JSON"):
        read_object(body, max_bytes=100, decoder=DECODER)


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (b"", "not JSON: Expecting value"),
        (b"{} {}", "not JSON: Extra data"),
        (b"\xff", "not UTF-8 text"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"a": %s}' % (b"9" * 5000), "not JSON: Exceeds the limit"),
        (b" " * 10_001, "10001 bytes, expected at most 10000"),
    ],
)
def test_what_is_not_an_object_within_the_limits_is_refused(body: bytes, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        read_object(body, max_bytes=10_000, decoder=DECODER)
