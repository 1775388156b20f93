"""The SASL exchange at the start of a connection: proton does not know MSSBCBS, .NET's only mechanism."""

from __future__ import annotations

HEADER = b"AMQP\x03\x01\x00\x00"
MECHANISMS = (b"MSSBCBS", b"ANONYMOUS")  # neither says who the client is: tokens do
HEADER_BYTES = 8  # of a frame, which begins with its size
MAX_FRAME_BYTES = 512  # of SASL, as AMQP says
_INIT, _MECHANISMS, _OUTCOME = b"\x00\x53\x41", b"\x00\x53\x40", b"\x00\x53\x44"
_OK, _AUTH_FAILED = b"\xc0\x03\x01\x50\x00", b"\xc0\x03\x01\x50\x01"


class Sasl:
    """The server's side. A client may leave it out, and begin with AMQP.

    Attributes:
        done: whether what follows is AMQP.
    """

    def __init__(self) -> None:
        self.done = False
        self._buffer = b""
        self._offered = False

    def receive(self, data: bytes) -> tuple[bytes, bytes]:
        """Take what a client sent; return the answer, and what follows the exchange.

        Raises:
            ValueError: this is not SASL, or another mechanism was chosen; the argument is the answer, if any.
        """
        self._buffer += data
        answer = b""
        if not self._offered:
            if len(self._buffer) < len(HEADER):
                return b"", b""
            if not self._buffer.startswith(HEADER):
                self.done = True
                return b"", self._buffer
            self._buffer = self._buffer[len(HEADER) :]
            self._offered = True
            names = b"".join(bytes([len(name)]) + name for name in MECHANISMS)
            array = b"\xe0" + bytes([len(names) + 2, len(MECHANISMS)]) + b"\xa3" + names
            answer = HEADER + _frame(_MECHANISMS + b"\xc0" + bytes([len(array) + 1, 1]) + array)
        size = int.from_bytes(self._buffer[:4], "big") if len(self._buffer) >= HEADER_BYTES else HEADER_BYTES
        if not HEADER_BYTES <= size <= MAX_FRAME_BYTES:
            raise ValueError(b"")
        if len(self._buffer) <= HEADER_BYTES or len(self._buffer) < size:
            return answer, b""
        frame, rest = self._buffer[:size], self._buffer[size:]
        chosen = any(b"\xa3" + bytes([len(name)]) + name in frame for name in MECHANISMS)
        if _INIT not in frame or not chosen:
            raise ValueError(answer + _frame(_OUTCOME + _AUTH_FAILED))
        self.done = True
        return answer + _frame(_OUTCOME + _OK), rest


def _frame(body: bytes) -> bytes:
    return (len(body) + HEADER_BYTES).to_bytes(4, "big") + b"\x02\x01\x00\x00" + body
