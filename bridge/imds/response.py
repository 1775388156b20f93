"""Read an HTTP/1 answer as it arrives, within limits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from bridge.errors import HttpFailure

_MAX_HEAD_BYTES = 64 * 1024
_MAX_INTERIM = 20  # answers (1xx) before the answer
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9]\d\d)[ \r]")
_HEADER = re.compile(
    rb"\r\n(content-length|transfer-encoding|connection|retry-after)[ \t]*:[ \t]*([^\r\n]*)", re.IGNORECASE
)
_LENGTH = re.compile(r"\d{1,15}", re.ASCII)
_CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]{1,12}(?=[ \t]*(?:;|$))")
_FIRST_FINAL_STATUS = 200
_WITHOUT_BODY = (204, 304)


@dataclass(frozen=True, kw_only=True)
class Response:
    """A complete answer.

    `headers` are those that are used, with names in lower case. `is_last` says that the connection cannot be used
    again.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    is_last: bool


class ResponseReader:
    """Reads the answer to one request.

    Args:
        max_body_bytes: of the largest body that is read.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._data = bytearray()
        self._body = bytearray()
        self._interim = 0
        self._status = 0
        self._is_last = False
        self._headers: dict[str, str] = {}
        self.is_empty = True

    def feed(self, received: bytes) -> Response | None:
        """Add what was received, b"" at the end of the connection; return the answer once it is complete.

        Raises:
            HttpFailure: it is not HTTP, it is too large, or the connection ended before it.
        """
        self._data += received
        self.is_empty = self.is_empty and not received
        if self._read_head() and self._read_body(is_end=not received):
            is_last = self._is_last or not received or bool(self._data)
            return Response(
                status=self._status, headers=self._headers, body=bytes(self._body), is_last=is_last
            )
        if not received:
            raise HttpFailure("the connection closed in the middle of an answer")
        return None

    def _read_head(self) -> bool:
        """Read the head of the answer, behind interim ones; return whether it is complete."""
        while not self._status:
            end = self._data.find(b"\r\n\r\n")
            if end < 0:
                return self._is_incomplete()
            self._parse_head(self._take(end + 4))
        return True

    def _parse_head(self, head: bytearray) -> None:
        match = _STATUS_LINE.match(head)
        if match is None:
            raise _not_http()
        if int(match[2]) < _FIRST_FINAL_STATUS:
            self._interim += 1
            if self._interim > _MAX_INTERIM:
                raise _not_http()
            return
        self._status = int(match[2])
        found = _HEADER.findall(head)
        self._headers = {name.decode().lower(): value.decode("latin-1").strip() for name, value in found}
        self._is_last = match[1] == b"0" or "close" in self._headers.get("connection", "").lower()

    def _read_body(self, *, is_end: bool) -> bool:
        """Read the body; return whether it is complete."""
        if self._status in _WITHOUT_BODY:
            return True
        if "transfer-encoding" in self._headers:
            return self._read_chunks()
        length = self._headers.get("content-length")
        if length is None:
            self._check_size(len(self._data))
            size = len(self._data) if is_end else None
        elif not _LENGTH.fullmatch(length):
            raise _not_http()
        else:
            self._check_size(int(length))
            size = int(length) if int(length) <= len(self._data) else None
        if size is not None:
            self._body += self._take(size)
        return size is not None

    def _read_chunks(self) -> bool:
        """Read the chunks that are complete; return whether the last one, of size 0, is there."""
        while (end := self._data.find(b"\r\n")) >= 0:
            size = _chunk_size(self._data[:end])
            self._check_size(len(self._body) + size)
            if size == 0:
                # Behind more than an empty line, or less, the connection cannot be used again.
                self._is_last = self._is_last or self._data[end:] != b"\r\n\r\n"
                self._data.clear()
                return True
            chunk_end = end + 2 + size
            if len(self._data) < chunk_end + 2:
                return False
            self._body += self._take(chunk_end + 2)[end + 2 : chunk_end]
        return self._is_incomplete()

    def _is_incomplete(self) -> bool:
        """Return False, because a line is not complete yet, unless it is too long."""
        if len(self._data) > _MAX_HEAD_BYTES:
            raise _not_http()
        return False

    def _take(self, size: int) -> bytearray:
        taken = self._data[:size]
        del self._data[:size]
        return taken

    def _check_size(self, size: int) -> None:
        if size > self._max_body_bytes:
            raise HttpFailure(f"an answer of more than {self._max_body_bytes} bytes")


def _chunk_size(line: bytearray) -> int:
    match = _CHUNK_SIZE.match(line)
    if match is None:
        raise _not_http()
    return int(match[0], 16)


def _not_http() -> HttpFailure:
    return HttpFailure("an answer that is not HTTP")
