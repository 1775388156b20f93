"""Answers of HTTP are read as they arrive, within limits, and whatever is in them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bridge.errors import HttpFailure
from bridge.imds.response import Response, ResponseReader

LIMIT = 1000
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
INTERIM = b"HTTP/1.1 102 Processing\r\nX: y\r\n\r\n"


def read(pieces: Iterable[bytes]) -> Response | str | None:
    """Return the answer or the failure of the first piece that brings one; None if none does."""
    reader = ResponseReader(LIMIT)
    try:
        return next(filter(None, map(reader.feed, pieces)), None)
    except HttpFailure as failure:
        return str(failure)


def octets(answer: bytes) -> list[bytes]:
    return [answer[at : at + 1] for at in range(len(answer))]


@pytest.mark.parametrize(
    ("answer", "status", "body", "is_last"),
    [
        (OK, 200, b"ok", False),
        (OK + b"more", 200, b"ok", True),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok", 200, b"ok", True),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", 200, b"ok", True),
        (b"HTTP/1.1 200 OK\r\nCONTENT-LENGTH:2\r\nno colon\r\n: \r\n\r\nok", 200, b"ok", False),
        (b"HTTP/1.1 500 \r\ncontent-length:0\r\n\r\n", 500, b"", False),
        (b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n", 302, b"", False),
        (b"HTTP/1.1 204\r\n\r\n", 204, b"", False),
        (CHUNKED + b"2\r\nok\r\nA;x=y\r\n, 34567890\r\n0\r\n\r\n", 200, b"ok, 34567890", False),
        (CHUNKED + b"2 \r\nok\r\n0\r\nTrailer: x\r\n\r\n", 200, b"ok", True),
        (CHUNKED + b"0\r\n", 200, b"", True),
        (INTERIM * 3 + OK, 200, b"ok", False),
    ],
)
def test_an_answer_is_read_to_its_end(answer: bytes, status: int, body: bytes, is_last: bool) -> None:
    response = read([answer])
    assert isinstance(response, Response)
    assert (response.status, response.body, response.is_last) == (status, body, is_last)


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    response = read([b"HTTP/1.1 200 OK\r\n\r\nuntil", b" the end", b""])
    assert isinstance(response, Response)
    assert (response.body, response.is_last) == (b"until the end", True)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "closed in the middle"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", "closed in the middle"),
        (CHUNKED + b"2\r\nok\r\n", "closed in the middle"),
        (CHUNKED + b"FF\r\nok\r\n", "closed in the middle"),
        (INTERIM, "closed in the middle"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n", "more than 1000 bytes"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1001, "more than 1000 bytes"),
        (CHUNKED + b"ffffffff\r\n", "more than 1000 bytes"),
        (CHUNKED + b"1F4\r\n" + b"x" * 500 + b"\r\n1F5\r\n", "more than 1000 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1_0\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", "not HTTP"),
        (CHUNKED + b"zz\r\n", "not HTTP"),
        (CHUNKED + b"-14\r\n" + b"x" * 40, "not HTTP"),
        (CHUNKED + b"0x2\r\nok\r\n", "not HTTP"),
        (CHUNKED + b"f" * 13 + b"\r\n", "not HTTP"),
        (CHUNKED + b"2" * 70_000, "not HTTP"),
        (INTERIM * 10_000 + OK, "not HTTP"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not HTTP"),
        (b"HTTP/2 200 OK\r\n\r\n", "not HTTP"),
        (b"x" * 70_000, "not HTTP"),
    ],
    ids=lambda value: repr(value[:60]),
)
def test_an_answer_that_cannot_be_read_is_a_failure(answer: bytes, reason: str) -> None:
    failure = read([answer, b""] if answer else [b""])
    assert isinstance(failure, str)
    assert reason in failure


@given(
    answer=st.lists(
        st.sampled_from([INTERIM, OK, CHUNKED, b"5\r\nhello\r\n", b"0\r\n", b"\r\n", b"-1\r\n", b"x"])
        | st.binary(max_size=20),
        max_size=8,
    ).map(b"".join),
    cuts=st.lists(st.integers(0, 400), max_size=6),
)
@example(answer=CHUNKED + b"5\r\nhello\r\n0\r\n\r\n", cuts=[])
def test_how_an_answer_is_divided_does_not_matter(answer: bytes, cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
    pieces = [answer[begin:end] for begin, end in pairwise(bounds) if begin < end]
    results = [read([*part, b""]) for part in ([answer] if answer else [], pieces, octets(answer))]
    seen = [(one.status, one.body) if isinstance(one, Response) else one for one in results]
    assert seen[0] == seen[1] == seen[2]


def test_a_body_of_many_small_chunks_is_read_in_bounded_time() -> None:
    reader = ResponseReader(1_000_000)
    reader.feed(CHUNKED)
    start = time.process_time()
    for _ in range(100_000):
        assert reader.feed(b"1\r\nx\r\n") is None
    response = reader.feed(b"0\r\n\r\n")
    assert response is not None
    assert len(response.body) == 100_000
    assert time.process_time() - start < 10
