"""Draw the chat messages and the console for README and docs: `python -m tools.pictures.draw FOLDER`.

Teams cards are rendered by the npm package adaptivecards; Slack has no such renderer, its blocks become plain HTML in
their order. The console's pages are those of `imds-bridge demo --console`, a moment after its beginning. The pictures
are for looking at; no test depends on them.
"""

from __future__ import annotations

import html
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from playwright.sync_api import Browser, expect

from bridge.formats.slack import Slack, SlackSettings
from bridge.formats.teams import Teams, TeamsSettings
from bridge.imds.diff import Change
from bridge.runtime.time import iso_utc
from tests.support.browser import chromium, opened
from tests.support.console import maintenance, running_console
from tests.support.npm import node_modules
from tests.support.samples import change_event, samples, scheduled_event, stored, with_data

AT = datetime(2026, 11, 20, 13, 3, 10, tzinfo=UTC)
SCALE = 1.5
STYLE = """
body { margin: 0; padding: 12px; width: max-content; background: #f5f5f5;
  font-family: "Segoe UI", "Liberation Sans"; }
main { display: grid; grid-template-columns: repeat(2, auto); gap: 12px; align-items: start; }
main:has(> :only-child) { grid-template-columns: auto; }
.card, .slack { box-sizing: border-box; width: 490px; background: #fff; border: 1px solid #ddd; border-radius: 6px; }
.card { overflow: hidden; }
.slack { padding: 8px 16px; font-size: 14px; }
.slack h3 { font-size: 17px; margin: 8px 0; } .slack pre { white-space: pre-wrap; background: #f6f6f6; padding: 6px; }
.slack .fields { display: grid; grid-template-columns: 1fr 1fr; gap: 4px 12px; margin: 8px 0; }
.slack .context { color: #666; font-size: 12px; margin: 6px 0; }
"""
CARDS = """
([cards, host]) => cards.forEach(content => {
  const card = new AdaptiveCards.AdaptiveCard();
  card.hostConfig = new AdaptiveCards.HostConfig(host);
  card.parse(content);
  const box = document.createElement("div");
  box.className = "card";
  box.appendChild(card.render());
  document.querySelector("main").appendChild(box);
})"""
HOST = {
    "fontFamily": "Segoe UI, Liberation Sans, sans-serif",
    "containerStyles": {
        name: {"backgroundColor": colour}
        for name, colour in (
            ("warning", "#fff3d6"),
            ("attention", "#fbdcdc"),
            ("good", "#dff6dd"),
            ("accent", "#dcebfb"),
        )
    },
}


def story() -> Iterator[tuple[datetime, dict[str, Any]]]:
    """Give the events of a reboot, each with the time at which it is seen."""
    start = AT + timedelta(minutes=15)
    announced = scheduled_event(AT)
    started = scheduled_event(AT, EventStatus="Started", NotBefore="")
    approved_at, started_at, over_at = (AT + timedelta(seconds=seconds) for seconds in (201, 208, 342))
    yield AT, _envelope(Change(kind="scheduled", event=announced), AT)
    receipt = next(event for event in samples(approved_at) if event.type.endswith("approval.accepted.v1"))
    yield approved_at, with_data(receipt.envelope, NotBeforeUtc=iso_utc(start))
    yield started_at, _envelope(Change(kind="started", event=started, previous=announced), started_at)
    yield over_at, _envelope(Change(kind="completed", event=started, previous=started), over_at)


def _envelope(change: Change, at: datetime) -> dict[str, Any]:
    return stored(change_event(change, at)).envelope


def slack(messages: list[Any]) -> str:
    """Write the blocks as plain HTML."""
    drawn = ("".join(map(_block, message["blocks"])) for message in messages)
    return f"<main>{''.join(f'<div class=slack>{blocks}</div>' for blocks in drawn)}</main>"


def _block(block: dict[str, Any]) -> str:
    if block["type"] == "header":
        return f"<h3>{_words(block['text'])}</h3>"
    if block["type"] == "context":
        return f"<div class=context>{' &nbsp; '.join(map(_words, block['elements']))}</div>"
    if "fields" in block:
        return (
            f"<div class=fields>{''.join(f'<div>{_words(field)}</div>' for field in block['fields'])}</div>"
        )
    return f"<div>{_words(block['text'])}</div>"


def _words(text: dict[str, Any]) -> str:
    if text["type"] == "plain_text":
        return html.escape(text["text"])
    written = re.sub(r"<!date\^[^|]*\|([^>]*)>", r"\1", text["text"])
    written = re.sub(r"```(.*?)```", r"<pre>\1</pre>", written, flags=re.DOTALL)
    return re.sub(r"\*([^*]+)\*", r"<b>\1</b>", written)


def draw_chat(browser: Browser, folder: Path) -> None:
    """Draw the messages of the story."""
    settings: dict[str, Any] = {
        "kind": "webhook",
        "url": "https://example.org/",
        "time_zone": "Europe/Berlin",
    }
    seen = [(event, at + timedelta(seconds=1)) for at, event in story()]
    teams, blocks = (
        Teams(TeamsSettings(**settings, format="teams")),
        Slack(SlackSettings(**settings, format="slack")),
    )
    cards = [teams.write(event, at)["attachments"][0]["content"] for event, at in seen]
    pictures: tuple[tuple[str, list[Any], str], ...] = (
        ("teams", cards, "<main></main>"),
        ("teams-card", cards[:1], "<main></main>"),
        ("slack", [], slack([blocks.write(event, at) for event, at in seen])),
    )
    renderer = node_modules("adaptivecards") / "adaptivecards" / "dist" / "adaptivecards.min.js"
    page = browser.new_page(viewport={"width": 1040, "height": 2000}, device_scale_factor=SCALE)
    for name, shown, body in pictures:
        page.set_content(f"<!doctype html><meta charset=utf-8><style>{STYLE}</style>{body}")
        page.add_script_tag(path=renderer)
        page.evaluate(CARDS, [shown, HOST])
        page.locator("body").screenshot(path=folder / f"{name}.png")


def draw_console(browser: Browser, folder: Path) -> None:
    """Draw the pages of the demo's console."""
    command = [sys.executable, "-m", "bridge", "demo", "--console", "127.0.0.1:0", "--minutes", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found
        for name, path in (("console-now", "/"), ("console-fleet", "/fleet")):
            page = browser.new_page(viewport={"width": 1280, "height": 900}, timezone_id="Europe/Berlin")
            page.goto(f"{found[0]}{path}")
            expect(page.locator("#live")).to_have_text("Live")
            page.screenshot(path=folder / f"{name}.png")
        process.terminate()


def draw_wave(browser: Browser, folder: Path) -> None:
    """Draw *Now* of 300 VMs under maintenance, on a desktop and on a phone."""
    at = datetime.now(UTC)
    with TemporaryDirectory() as state, running_console(Path(state)) as console:
        console.send(*maintenance(at))
        for name, width, height in (("console-wave", 1440, 900), ("console-wave-phone", 390, 844)):
            with opened(browser, console.url, viewport={"width": width, "height": height}) as page:
                page.goto("/")
                expect(page.locator("#live")).to_have_text("Live")
                page.screenshot(path=folder / f"{name}.png")


if __name__ == "__main__":
    with chromium() as chrome:
        draw_chat(chrome, Path(sys.argv[1]).resolve())
        draw_console(chrome, Path(sys.argv[1]).resolve())
        draw_wave(chrome, Path(sys.argv[1]).resolve())
