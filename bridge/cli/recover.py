"""The command `recover`: have a VM that is out of work put back, or say that a person did it."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime

from bridge.arguments import OK, add_flag, complete, state_folder
from bridge.contract.status import ListenStatus
from bridge.errors import UsageError
from bridge.outbox import inspect
from bridge.outbox.rows import REQUEST
from bridge.process.status import read_report
from bridge.runtime.text import show

_EPILOG = """\
The listener runs `recover` of its rules on its own, and repeats it while it fails. Refused while an event for which
this VM was prepared is in the document, and while a program runs. On a disk that comes from another VM, which was out
of work, nothing runs until a person has decided by this command.

examples:
  imds-bridge recover           run `recover` now, without the pause after a failure
  imds-bridge recover --done    a person has put the VM back to work: nothing is run
"""


def configure(command: argparse.ArgumentParser) -> None:
    """Complete the parser of `recover`."""
    complete(command, _run, epilog=_EPILOG)
    command.set_defaults(role="listen")
    add_flag(command, "--done", "a person did it: nothing is left to be run")


def _run(arguments: argparse.Namespace) -> int:
    folder = state_folder(arguments)
    report = read_report(folder, datetime.now(UTC))
    owed = report.status.flow.out_of_work if isinstance(report.status.flow, ListenStatus) else ()
    if not owed:
        raise UsageError("recover: by its last status, this VM is not out of work; nothing was changed")
    if not report.running:
        raise UsageError(
            "recover: `imds-bridge listen` does not run; once it is started, it recovers on its own"
        )
    if held := [str(one.Why) for one in owed if one.IsHeld]:
        raise UsageError(f"recover: this VM stays out of work, nothing was changed: {'; '.join(held)}")
    if error := report.status.storage_error:
        raise UsageError(f"recover: the listener cannot read what is asked, nothing was changed: {error}")
    since = min(str(one.Since) for one in owed)
    inspect.ask(folder, REQUEST, f"done {since}" if arguments.done else "try")
    show("the listener does so with its next document; see `imds-bridge status --role listen`")
    return OK
