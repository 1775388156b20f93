"""The command `imds-bridge demo`: a story on the simulators, with the real processes."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from bridge.errors import UsageError
from bridge.lab.prerequisites import explain, missing

CONSOLE_ADDRESS = "127.0.0.1:8080"
_EPILOG = """\
Takes about a minute. Exits 0 only if every event has arrived.

examples:
  imds-bridge demo
  imds-bridge demo --no-bus                needs no compiler
  imds-bridge demo --fast                  for CI
  imds-bridge demo --console               the console with a fleet, for ten minutes
"""


def configure(command: argparse.ArgumentParser) -> None:
    """Complete the parser of `demo`."""
    command.description = (
        "Explain Scheduled Events and imds-bridge, with the real processes on a simulated IMDS, Service Bus and\n"
        "Event Grid: an announcement, a failing receiver, kill -9, an approval and a forged one."
    )
    command.epilog = _EPILOG
    add = command.add_argument
    no_bus = "leave out approvals and the Service Bus, which has to be compiled"
    add("--no-bus", action="store_true", help=no_bus)
    add("--fast", action="store_true", help="leave out the pauses for reading")
    console = (
        "show the console instead, with 60 simulated VMs at 60 times the speed; it listens on this loopback "
        f"address (default: {CONSOLE_ADDRESS})"
    )
    add("--console", nargs="?", const=CONSOLE_ADDRESS, metavar="ADDRESS", help=console)
    minutes = "end the console after them (default: 10)"
    add("--minutes", type=float, default=10.0, metavar="N", help=minutes)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo; return 0 only if everything arrived. Raise UsageError if a package is missing."""
    if args.console is None:
        return _play(with_bus=not args.no_bus, fast=args.fast)
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise UsageError("demo: starlette and uvicorn are not installed; pip install 'imds-bridge[console]'")
    from bridge.lab.demo.console import show_console  # noqa: PLC0415 - it needs the extra `console`

    return show_console(listen=args.console, minutes=args.minutes)


def _play(*, with_bus: bool, fast: bool) -> int:
    if with_bus and find_spec("proton") is None:
        first = f"{explain(missing())}; then " if missing() else ""
        raise UsageError(
            f"demo: python-qpid-proton is not installed; {first}pip install 'imds-bridge[lab]'; "
            "or run: imds-bridge demo --no-bus"
        )
    from bridge.lab.demo.story import demonstrate  # noqa: PLC0415 - for a quick answer

    return demonstrate(with_bus=with_bus, fast=fast)
