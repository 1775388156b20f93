"""Run the real command imds-bridge with one more certificate to trust: the SDK takes those of `certifi` only."""

from __future__ import annotations

import sys

import certifi

from bridge.cli import main as cli


def main() -> int:
    trusted, *arguments = sys.argv[1:]
    certifi.where = lambda: trusted
    return cli.main(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
