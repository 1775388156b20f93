"""How often open pages are notified."""

from __future__ import annotations

import asyncio

import pytest

from bridge.console import live
from bridge.console.live import Live


@pytest.mark.parametrize(
    ("pages", "apart"), [(1, live.APART_SECONDS), (50, 50 * live.PAGE_SECONDS), (200, live.REPEAT_SECONDS)]
)
def test_many_open_pages_are_notified_at_once_and_then_less_often(
    monkeypatch: pytest.MonkeyPatch, pages: int, apart: float
) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    async def run() -> None:
        streams = Live(lambda: 7)
        streams.start()
        opened = [streams.stream() for _ in range(pages)]
        for stream in opened:
            assert "data: 7" in await anext(stream)
        for _ in range(2):
            streams.notify()
            await sleep(0)
            for stream in opened:
                assert "event: version" in await anext(stream)

    monkeypatch.setattr(asyncio, "sleep", note)
    asyncio.run(run())
    assert pauses == [apart] * pages
