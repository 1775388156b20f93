"""The command `imds-bridge demo`."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from bridge.errors import UsageError
from bridge.lab.prerequisites import explain, missing


def configure(command: argparse.ArgumentParser) -> None:
    """Complete the parser of `demo`."""
    command.description = (
        "Play a live migration, a cancellation and an approved reboot on a simulated IMDS, Service Bus and\n"
        "Event Grid, with the real `forward`, `listen` and `approve`, and print each step.\n"
        "Takes about 20 seconds; the exit code is 0 only if every event arrived."
    )
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.add_argument(
        "--no-bus",
        action="store_true",
        help="without the Service Bus, which has to be compiled, and approvals",
    )
    command.set_defaults(run=lambda args: run(with_bus=not args.no_bus))


def run(*, with_bus: bool) -> int:
    """Run the demonstration; return 0 only if everything arrived.

    Args:
        with_bus: whether to simulate a Service Bus and to approve over it.

    Raises:
        UsageError: the package of the simulated Service Bus is not installed.
    """
    if with_bus and find_spec("proton") is None:
        first = f"{explain(missing())}; then " if missing() else ""
        raise UsageError(
            f"demo: python-qpid-proton is not installed; {first}pip install 'imds-bridge[lab]'; "
            "or run: imds-bridge demo --no-bus"
        )
    from bridge.lab.demonstration import demonstrate  # noqa: PLC0415 - for a quick answer

    return demonstrate(with_bus=with_bus)
