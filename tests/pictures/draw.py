"""Draw the messages of the README as Teams and Slack show them: `python -m tests.pictures.draw FOLDER`.

Teams cards are rendered by the npm package adaptivecards in headless Chromium; Slack has no such renderer, its blocks
become plain HTML in their order. The pictures are for looking at; no test depends on them.
"""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from bridge.formats.slack import Slack, SlackSettings
from bridge.formats.teams import Teams, TeamsSettings
from bridge.imds.diff import Change
from bridge.runtime.time import iso_utc
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
# Chromium draws what fits into its window: it is opened twice, first to measure.
MEASURE = """<script>
const box = document.body.getBoundingClientRect();
document.body.dataset.size = Math.ceil(box.width) + "," + Math.ceil(box.height);
</script>"""
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


def teams(messages: list[Any]) -> str:
    """Write a page in which the npm package renders the cards."""
    script = node_modules("adaptivecards") / "adaptivecards" / "dist" / "adaptivecards.min.js"
    cards = json.dumps([message["attachments"][0]["content"] for message in messages])
    return f"""<main></main><script src="file://{script}"></script><script>
for (const content of {cards}) {{
  const card = new AdaptiveCards.AdaptiveCard();
  card.hostConfig = new AdaptiveCards.HostConfig({json.dumps(HOST)});
  card.parse(content);
  const box = document.createElement("div");
  box.className = "card";
  box.appendChild(card.render());
  document.querySelector("main").appendChild(box);
}}</script>"""


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


def pages() -> Iterator[tuple[str, str]]:
    """Give each picture's name and page."""
    settings: dict[str, Any] = {
        "kind": "webhook",
        "url": "https://example.org/",
        "time_zone": "Europe/Berlin",
    }
    cards = Teams(TeamsSettings(**settings, format="teams"))
    blocks = Slack(SlackSettings(**settings, format="slack"))
    drawn = [cards.write(event, at + timedelta(seconds=1)) for at, event in story()]
    yield "teams", teams(drawn)
    yield "teams-card", teams(drawn[:1])
    yield "slack", slack([blocks.write(event, at + timedelta(seconds=1)) for at, event in story()])


def draw(folder: Path) -> None:
    """Write the pictures into a folder."""
    with tempfile.TemporaryDirectory() as scratch:
        for name, page in pages():
            file = Path(scratch) / f"{name}.html"
            html_page = f"<!doctype html><meta charset=utf-8><style>{STYLE}</style>{page}{MEASURE}"
            file.write_text(html_page, encoding="utf-8")
            size = re.search(r'data-size="(\d+,\d+)"', _open(file, "--dump-dom", "--window-size=1040,2000"))
            assert size
            _open(file, f"--screenshot={folder / name}.png", f"--window-size={size[1]}")


def _open(page: Path, *options: str) -> str:
    """Open a page in Chromium without a window; return what is printed."""
    offline = ("background-networking", "component-update", "sync", "quic", "gpu")
    command = ["chromium", "--headless", "--no-sandbox", "--no-first-run", "--hide-scrollbars"]
    command += [f"--force-device-scale-factor={SCALE}", f"--user-data-dir={page.parent}/profile"]
    command += [*(f"--disable-{one}" for one in offline), *options, page.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, timeout=120, text=True).stdout


if __name__ == "__main__":
    draw(Path(sys.argv[1]).resolve())
