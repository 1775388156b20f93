"""Find the values of an encoded AMQP message by their sizes alone, without decoding them."""

from __future__ import annotations

from collections.abc import Iterator

SMALL_ULONG, ULONG = 0x53, 0x80

# A constructor's upper four bits give the width of its value (AMQP 1.0, part 1, section 1.2).
_FIXED_WIDTHS = {0x4: 0, 0x5: 1, 0x6: 2, 0x7: 4, 0x8: 8, 0x9: 16}
_SIZE_BYTES = {0xA: 1, 0xC: 1, 0xE: 1, 0xB: 4, 0xD: 4, 0xF: 4}


def end_of_value(data: memoryview, at: int) -> int:
    """Return where the value that starts at a position ends.

    Raises:
        ValueError: it does not end within the data.
    """
    values = 1
    while values:
        if at >= len(data):
            raise ValueError("a value ends after its message")
        constructor = data[at]
        at += 1
        if constructor == 0x00:
            values += 1  # a descriptor, and the value that it describes
            continue
        values -= 1
        width = constructor >> 4
        if width in _FIXED_WIDTHS:
            at += _FIXED_WIDTHS[width]
        elif width in _SIZE_BYTES:
            size_bytes = _SIZE_BYTES[width]
            at += size_bytes + int.from_bytes(data[at : at + size_bytes])
        else:
            raise ValueError(f"0x{constructor:02x} is not a constructor of AMQP 1.0")
    if at > len(data):
        raise ValueError("a value ends after its message")
    return at


def sections(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the descriptor and the value of each section of a message.

    Raises:
        ValueError: the rest of the data is not a section.
    """
    at = 0
    while at < len(data):
        if data[at] != 0x00 or at + 1 >= len(data) or data[at + 1] not in (SMALL_ULONG, ULONG):
            raise ValueError("a section does not start with its descriptor")
        start = end_of_value(data, at + 1)
        end = end_of_value(data, start)
        yield int.from_bytes(data[at + 2 : start]), data[start:end]
        at = end


def items(value: memoryview) -> Iterator[memoryview]:
    """Yield the items of a list, or the keys and values of a map in turn, each still encoded.

    Raises:
        ValueError: it is neither, or an item does not end within it.
    """
    width = value[0] >> 4
    if width not in (0xC, 0xD):
        if value[0] == 0x45:  # noqa: PLR2004 - the empty list
            return
        raise ValueError("neither a list nor a map")
    size_bytes = _SIZE_BYTES[width]
    at = 1 + 2 * size_bytes  # after size and count
    while at < len(value):
        end = end_of_value(value, at)
        yield value[at:end]
        at = end
