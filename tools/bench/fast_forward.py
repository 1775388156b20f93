"""Run the real command imds-bridge, polling faster than a configuration may ask for: SECONDS ARGUMENT..."""

from __future__ import annotations

import sys
from typing import Any

from bridge import arguments
from bridge.cli.main import main
from bridge.config.loader import load
from bridge.config.models import Config


def load_fast(*given: Any) -> Config:
    """Load the configuration, and lift the lower limit of the interval."""
    config = load(*given)
    imds = config.imds.model_copy(update={"poll_seconds": float(sys.argv[1])})
    return config.model_copy(update={"imds": imds})


if __name__ == "__main__":
    vars(arguments).update(load=load_fast)  # the command calls it
    raise SystemExit(main(sys.argv[2:]))
