"""Describe the result of an approve command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from bridge.formats.message import Field, Message, RenderContext, Tone
from bridge.formats.scheduled import noun_of
from bridge.formats.text import sanitize, truncate
from bridge.formats.view import EventView

_RELEASES_LENGTH = 400
_REASON_LENGTH = 45  # in the title, as is the next
_OUTCOME_LENGTH = 20
_OUTCOMES: Mapping[str, tuple[Tone, str]] = {
    "accepted": ("accent", "Approved"),
    "rejected": ("warning", "Approval rejected"),
    "failed": ("attention", "Approval failed"),
}
_REASONS = {
    "malformed": "the command cannot be read",
    "bad_signature": "its signature is not valid",
    "expired": "the command had expired",
    "unknown_event": "the event is not in the VM's document",
    "already_started": "the event has already started",
    "other_vm": "the event does not affect this VM",
    "denied": "the policy does not allow it",
    "imds_refused": "IMDS refused it",
    "imds_unavailable": "IMDS did not answer",
    "approved": "",
    "already_approved": "it had been approved before",
}


def describe_receipt(view: EventView, context: RenderContext) -> Message:
    """Describe whether the event was approved, why not, and what follows."""
    outcome = view.kind.partition(".")[2]
    tone, text = _OUTCOMES.get(outcome, ("default", f"Approval {truncate(outcome, _OUTCOME_LENGTH)}"))
    reason = _REASONS.get(view.get("Reason"), view.get("Reason"))
    is_dry_run = view.data.get("DryRun") is True
    before = f"{'Dry run, not sent: ' if is_dry_run else ''}{text}"
    after = f" ({truncate(reason, _REASON_LENGTH)})" if reason else ""
    is_known = view.count or view.event_type
    return Message(
        tone=tone,
        title=view.title(f"{before}: {noun_of(view)}", after) if is_known else f"{before}{after}",
        sentences=tuple(_sentences(outcome, is_dry_run=is_dry_run)),
        fields=tuple(_fields(view, context)),
    )


def _sentences(outcome: str, *, is_dry_run: bool) -> Iterator[str]:
    if is_dry_run:
        yield "This was a dry run: nothing was sent to IMDS."
    elif outcome == "accepted":
        yield "The start may still wait for other VMs on the host."
    elif outcome == "failed":
        yield "It is not approved. Send the command again, or the event starts at its scheduled time."


def _fields(view: EventView, context: RenderContext) -> Iterator[Field]:
    given = view.data.get("Command")
    command = given if isinstance(given, Mapping) else {}
    texts = {
        "Reason": "" if view.get("Reason") in _REASONS else view.get("Reason"),
        "Detail": view.get("Detail"),
        "Releases": view.vms(_RELEASES_LENGTH) if view.kind.endswith(".accepted") else "",
        "Requested by": sanitize(command.get("RequestedBy")),
        "Because": sanitize(command.get("Reason")),
    }
    yield from (context.field(label, text) for label, text in texts.items() if text)
    start = view.not_before
    if start and context.seconds_until(start) > 0:
        yield context.field("Starts automatically", f"{context.relative(start)}, at ", start)
    if identifier := sanitize(command.get("Id")):
        yield context.field("Command", identifier)
