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
_MAY_BE = "It may be approved: the POST may have reached IMDS."
_AGAIN = "If the event is still scheduled, send a new command."
_NO = "This did not approve it."
_REPEATED = (
    "The program runs again while the event is scheduled; until it succeeds, no auto rule approves it."
)

REASONS: Mapping[str, Reason] = {
    "approved": Reason("", _MAY_WAIT),
    "already_approved": Reason("it had been approved before", _MAY_WAIT),
    "not_recorded": Reason("IMDS no longer lists it as scheduled", _MAY_BE, "Approval not recorded"),
    "malformed": Reason("it is no valid command", f"{_NO} Correct the command, and give it a new id."),
    "bad_signature": Reason("its signature could not be verified", f"{_NO} {_AGAIN}"),
    "expired": Reason("the command has expired", f"{_NO} {_AGAIN}"),
    "unknown_event": Reason("IMDS did not list the event in time", f"{_NO} {_AGAIN}"),
    "already_started": Reason("the event has started", "There is nothing left to approve."),
    "other_vm": Reason("it is for another VM", f"{_NO} Send a new command to the VM that it is for."),
    "advisory": Reason("it is an early warning", "Nothing was scheduled, and nothing could be approved."),
    "denied": Reason("it is not allowed", f"{_NO} Detail names the rule or the status that is in the way."),
    "not_prepared": Reason("its program did not succeed", _REPEATED, "Preparation failed"),
    "imds_refused": Reason("IMDS refused it", f"{_NO} {_AGAIN}"),
    "imds_unavailable": Reason("IMDS did not take it in time", f"{_NO} {_AGAIN}"),
    "unknown_outcome": Reason("IMDS's answer is not known", f"{_MAY_BE} {_AGAIN}", "Approval uncertain"),
}
