"""What a receipt says of its reason: true for every way in which the listener comes to that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Reason(NamedTuple):
    """A reason in words: short for the title, what follows, and how the title begins if not by the outcome."""

    short: str
    sentence: str
    title: str = ""


_MAY_WAIT = "If the event has not started yet, it may still wait for other VMs on the host."
_NEW_COMMAND = "If the event is still scheduled, send a new command."

REASONS: Mapping[str, Reason] = {
    "approved": Reason("", _MAY_WAIT),
    "already_approved": Reason("it had been approved before", _MAY_WAIT),
    "not_recorded": Reason(
        "IMDS no longer lists it as scheduled",
        "It may be approved: the POST may have reached IMDS. There is nothing to approve now.",
        title="Approval not recorded",
    ),
    "malformed": Reason(
        "it is no valid command", "This approved nothing: correct the command, and send it with a new id."
    ),
    "bad_signature": Reason(
        "its signature could not be verified",
        "This approved nothing: send a new command, signed with a secret that the listener can read.",
    ),
    "expired": Reason("the command has expired", f"This did not approve it. {_NEW_COMMAND}"),
    "unknown_event": Reason(
        "IMDS did not list the event in time", f"This did not approve it. {_NEW_COMMAND}"
    ),
    "already_started": Reason("the event has started", "There is nothing left to approve."),
    "other_vm": Reason(
        "it is for another VM", "This did not approve it: send a new command to the VM that it is for."
    ),
    "advisory": Reason("it is an early warning", "Nothing was scheduled, and nothing could be approved."),
    "denied": Reason(
        "it is not allowed", "This did not approve it. A new command is refused as well while that is so."
    ),
    "not_prepared": Reason(
        "its program did not succeed",
        "The program runs again while the event is scheduled; no auto rule approves it before that succeeds.",
        title="Preparation failed",
    ),
    "imds_refused": Reason("IMDS refused it", f"This did not approve it. {_NEW_COMMAND}"),
    "imds_unavailable": Reason("IMDS did not take it in time", f"This did not approve it. {_NEW_COMMAND}"),
    "unknown_outcome": Reason(
        "IMDS's answer is not known",
        f"It may be approved: the POST may have reached IMDS. {_NEW_COMMAND}",
        title="Approval uncertain",
    ),
}
