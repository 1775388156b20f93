"""imds-bridge on Windows, which stops in order when a file appears: nothing can send it Ctrl-Break under Wine."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # a script has no packages beside it

from bridge.cli.main import main

FOLDER = Path(os.environ.get("TEST_STOPPABLE", ""))


def stop_when_asked() -> None:
    """Raise what Ctrl-Break raises."""
    while not (FOLDER / "stop-asked").exists():
        time.sleep(0.05)
    signal.raise_signal(getattr(signal, "SIGBREAK", signal.SIGTERM))


if __name__ == "__main__":
    if "TEST_STOPPABLE" in os.environ:
        (FOLDER / "windows-pid").write_text(str(os.getpid()))
        threading.Thread(target=stop_when_asked, daemon=True).start()
    sys.exit(main())
