"""Run the real command `imds-bridge forward`, polling faster than a configuration may ask for."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from bridge.cli import common
from bridge.cli.main import main as run
from bridge.config.loader import load
from bridge.config.models import Config


def main() -> int:
    path, poll_seconds = sys.argv[1:]

    def load_fast(config_path: Path | None, environ: Mapping[str, str]) -> Config:
        config = load(config_path, environ)
        imds = config.imds.model_copy(update={"poll_seconds": float(poll_seconds)})
        return config.model_copy(update={"imds": imds})

    vars(common).update(load=load_fast)  # the command calls it
    return run(["forward", "--config", path])


if __name__ == "__main__":
    raise SystemExit(main())
