"""JSON from outside: what is read, and what is refused with which words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bridge.runtime.json import BoundedDecoder, read_object

DECODER = BoundedDecoder(max_depth=3)


@pytest.mark.parametrize("value", [1, "x", None, [], {}, {"a": [1]}, {"a": [{"b": 1}]}, [[[]]]])
def test_json_within_the_depth_is_read(value: Any) -> None:
    assert DECODER.decode(json.dumps(value)) == value


@pytest.mark.parametrize("text", ["[[[[]]]]", '{"a": [{"b": []}]}', "[" * 100_000, '{"a":' * 100_000])
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
