"""Draw the console's pages Now and Fleet: `python -m tests.pictures.console FOLDER`.

The pages are those of `imds-bridge demo --console`, a moment after its beginning. The pictures are for looking at; no
test depends on them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import ViewportSize, expect

from tests.support.browser import chromium

PICTURES = {"console-now": "/", "console-fleet": "/fleet"}
SIZE: ViewportSize = {"width": 1100, "height": 900}
STOP_SECONDS = 30


@contextmanager
def demo() -> Iterator[str]:
    """Run the console of the demo; return its address."""
    command = [sys.executable, "-m", "bridge", "demo", "--console", "127.0.0.1:0", "--minutes", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found
            yield found[0]
        finally:
            process.terminate()
            process.wait(STOP_SECONDS)


def draw(folder: Path) -> None:
    """Write the pictures into a folder."""
    with chromium() as browser, demo() as address:
        for name, path in PICTURES.items():
            page = browser.new_page(viewport=SIZE, timezone_id="Europe/Berlin")
            page.goto(f"{address}{path}")
            expect(page.locator("#live")).to_have_text("Live")
            page.screenshot(path=folder / f"{name}.png")


if __name__ == "__main__":
    draw(Path(sys.argv[1]).resolve())
