"""How often open pages are notified."""

from __future__ import annotations

import asyncio

import pytest

from bridge.console import live
from bridge.console.live import Live


@pytest.mark.parametrize(("pages", "apart"), [(1, live.APART_SECONDS), (20, 2.0), (200, live.REPEAT_SECONDS)])
def test_open_pages_are_notified_at_once_and_then_the_rarer_the_more_they_are(
    pages: int, apart: float
) -> None:
    async def run() -> None:
        streams = Live(lambda: 7)
        streams.start()
        opened = [streams.stream() for _ in range(pages)]
        for stream in opened:
            assert "data: 7" in await anext(stream)
        streams.notify()
        async with asyncio.timeout(30):
            for stream in opened:
                assert "event: version" in await anext(stream)
        assert streams.apart_seconds() == pytest.approx(apart)

    asyncio.run(run())
