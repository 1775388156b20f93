"""How often open pages are notified."""

from __future__ import annotations

from contextlib import suppress

from bridge.console.live import APART_SECONDS, REPEAT_SECONDS, SHARE, Live

STREAMS = 8


def test_open_pages_together_take_only_a_share_of_a_processor() -> None:
    live = Live(int)
    streams = [live.stream() for _ in range(STREAMS)]
    for stream in streams:
        with suppress(StopIteration):  # what a coroutine raises that returns
            anext(stream).__await__().__next__()
    live.page_seconds = 0.002
    assert live.apart_seconds() == APART_SECONDS
    live.page_seconds = 0.05
    assert STREAMS * live.page_seconds / live.apart_seconds() == SHARE
    live.page_seconds = 5.0
    assert live.apart_seconds() == REPEAT_SECONDS  # a page that hears nothing for longer says so
