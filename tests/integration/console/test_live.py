"""How often open pages are notified."""

from __future__ import annotations

import asyncio

import pytest

from bridge.console import live
from bridge.console.live import Live


@pytest.mark.parametrize(
    ("pages", "page_seconds", "apart"),
    [
        (1, 0.001, live.APART_SECONDS),
        (50, 0.001, 50 * 0.001 / live.SHARE),
        (10, 0.075, 10 * 0.075 / live.SHARE),
        (200, 0.075, live.REPEAT_SECONDS),
    ],
)
def test_open_pages_are_notified_at_once_and_then_so_often_that_they_take_a_share_of_a_processor(
    pages: int, page_seconds: float, apart: float
) -> None:
    async def run() -> None:
        streams = Live(lambda: 7)
        streams.start()
        streams.page_seconds = page_seconds
        opened = [streams.stream() for _ in range(pages)]
        for stream in opened:
            assert "data: 7" in await anext(stream)
        streams.notify()
        async with asyncio.timeout(live.REPEAT_SECONDS):
            for stream in opened:
                assert "event: version" in await anext(stream)
        assert streams.apart_seconds() == pytest.approx(apart)

    asyncio.run(run())
