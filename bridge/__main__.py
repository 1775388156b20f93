"""Run `imds-bridge` as `python -m bridge`."""

from bridge.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
