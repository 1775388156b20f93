"""Say what became of a command to approve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from bridge.formats.scheduled import noun_of
from bridge.formats.text import Fact, Moment, Said, Tone, clean, cut
from bridge.formats.view import Reading

_RELEASES_LENGTH = 400
_REASON_LENGTH = 45  # of the title, as is the next
_OUTCOME_LENGTH = 20
_OUTCOMES: Mapping[str, tuple[Tone, str]] = {
    "accepted": ("accent", "Approved"),
    "rejected": ("warning", "Approval rejected"),
    "failed": ("attention", "Approval failed"),
}
_REASONS = {
    "malformed": "the command cannot be read",
    "bad_signature": "its signature is not valid",
    "expired": "it came too late",
    "unknown_event": "no such event stands in the VM's document",
    "already_started": "the event has started already",
    "other_vm": "it is another VM's to approve",
    "denied": "the policy does not allow it",
    "imds_refused": "IMDS refused it",
    "imds_unavailable": "IMDS did not answer",
    "approved": "",
    "already_approved": "it had been approved before",
}


def tell_receipt(reading: Reading, moment: Moment) -> Said:
    """Say whether it was approved, why not, and what follows."""
    outcome = reading.kind.partition(".")[2]
    tone, words = _OUTCOMES.get(outcome, ("default", f"Approval {cut(outcome, _OUTCOME_LENGTH)}"))
    reason = _REASONS.get(reading.get("Reason"), reading.get("Reason"))
    is_dry_run = reading.data.get("DryRun") is True
    before = f"{'Dry run, not sent: ' if is_dry_run else ''}{words}"
    after = f" ({cut(reason, _REASON_LENGTH)})" if reason else ""
    known = reading.count or reading.event_type
    title = reading.title(f"{before}: {noun_of(reading)}", after) if known else f"{before}{after}"
    return Said(
        tone=tone,
        title=title,
        sentences=tuple(_sentences(outcome, is_dry_run=is_dry_run)),
        facts=tuple(_facts(reading, moment)),
    )


def _sentences(outcome: str, *, is_dry_run: bool) -> Iterator[str]:
    if is_dry_run:
        yield "This was a dry run: nothing was sent to IMDS."
    elif outcome == "accepted":
        yield "The start may still wait for other VMs on the host."
    elif outcome == "failed":
        yield "It is not approved; send the command again, or it starts by itself at its time."


def _facts(reading: Reading, moment: Moment) -> Iterator[Fact]:
    command = reading.data.get("Command")
    asked = command if isinstance(command, Mapping) else {}
    told = {
        "Reason": "" if reading.get("Reason") in _REASONS else reading.get("Reason"),
        "Detail": reading.get("Detail"),
        "Releases": reading.vms(_RELEASES_LENGTH) if reading.kind.endswith(".accepted") else "",
        "Requested by": clean(asked.get("RequestedBy")),
        "Because": clean(asked.get("Reason")),
    }
    yield from (moment.fact(label, text) for label, text in told.items() if text)
    start = reading.not_before
    if start and moment.until(start) > 0:
        yield moment.fact("Starts by itself", f"{moment.countdown(start)}, at ", start)
    if identifier := clean(asked.get("Id")):
        yield moment.fact("Command", identifier)
