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

from bridge.formats.samples import change_event, http_date, samples, scheduled_event, stored
from bridge.formats.slack import Slack, SlackSettings
from bridge.formats.teams import Teams, TeamsSettings
from bridge.imds.diff import Change
from bridge.imds.document import ScheduledEvent
from tests.support.npm import node_modules

AT = datetime(2026, 11, 20, 13, 3, 10, tzinfo=UTC)
STYLE = """
body { margin: 0; padding: 16px; background: #f5f5f5; font-family: "Segoe UI", "DejaVu Sans", sans-serif; }
main { display: flex; flex-wrap: wrap; gap: 16px; align-items: flex-start; }
.card { background: #fff; border: 1px solid #e1e1e1; border-radius: 6px; overflow: hidden; }
.slack, .card { box-sizing: border-box; width: 464px; }
.slack { background: #fff; border: 1px solid #ddd; border-radius: 8px; padding: 8px 16px;
  font-size: 14px; }
.slack h3 { font-size: 17px; margin: 8px 0; } .slack pre { white-space: pre-wrap; background: #f6f6f6; padding: 6px; }
.slack .fields { display: grid; grid-template-columns: 1fr 1fr; gap: 4px 12px; margin: 8px 0; }
.slack .context { color: #666; font-size: 12px; margin: 6px 0; }
"""
HOST = {
    "fontFamily": "Segoe UI, DejaVu Sans, sans-serif",
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


def shown() -> list[dict[str, Any]]:
    """Choose four messages that show the kinds of messages."""
    scheduled, started, _, completed, *_ = (event.envelope for event in samples(AT))
    redeploy = scheduled_event(
        AT, EventType="Redeploy", Resources=["web-0"], NotBefore=http_date(AT + timedelta(days=6, hours=4))
    )
    return [scheduled, _envelope(redeploy), started, completed]


def _envelope(event: ScheduledEvent) -> dict[str, Any]:
    return stored(change_event(Change(kind="scheduled", event=event), AT)).envelope


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
    now = AT + timedelta(seconds=1)
    cards = Teams(TeamsSettings(**settings, format="teams"))
    blocks = Slack(SlackSettings(**settings, format="slack"))
    yield "teams", teams([cards.write(event, now) for event in shown()])
    yield "slack", slack([blocks.write(event, now) for event in shown()])


def draw(folder: Path) -> None:
    """Write the pictures into a folder."""
    with tempfile.TemporaryDirectory() as scratch:
        for name, page in pages():
            file = Path(scratch) / f"{name}.html"
            file.write_text(
                f"<!doctype html><meta charset=utf-8><style>{STYLE}</style>{page}", encoding="utf-8"
            )
            command = [
                "chromium",
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-quic",
                "--no-first-run",
            ]
            command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
            command += [f"--user-data-dir={scratch}/profile", "--hide-scrollbars", "--window-size=976,690"]
            command += [f"--screenshot={folder / name}.png", file.as_uri()]
            subprocess.run(command, check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    draw(Path(sys.argv[1]).resolve())
