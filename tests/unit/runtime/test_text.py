"""Text from outside controls no terminal, and JSON stays JSON."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.formats.text import table
from bridge.runtime.text import escape, show
from tests.support.diff import json_values


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


@given(text=st.text())
def test_no_control_character_is_left_and_escaping_again_changes_nothing(text: str) -> None:
    shown = escape(text)
    assert not {"Cc", "Cs", "Zl", "Zp"} & {unicodedata.category(letter) for letter in shown}
    assert not {"RLO", "LRO", "RLE", "LRE", "PDF", "RLI", "LRI", "FSI", "PDI"} & {
        unicodedata.bidirectional(letter) for letter in shown
    }
    assert escape(shown) == shown


@given(value=json_values(), is_ascii=st.booleans())
def test_json_keeps_its_value(value: object, is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii)
    assert json.dumps(json.loads(escape(text)), ensure_ascii=is_ascii) == text  # NaN is not equal to itself


def test_a_line_break_within_a_line_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    show("first", "second\nforged")
    assert capsys.readouterr().out == "first\nsecond\\nforged\n"


def test_the_columns_of_a_table_are_aligned_as_they_are_shown() -> None:
    rows = [("\x1b", "1"), ("long", "2\n3")]
    assert table(("A", "B"), rows) == ["A       B", r"\u001b  1", r"long    2\n3"]
