"""Receipts in words: a walk over every reason that the code can give, and what the message claims."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from bridge.contract.types import RECEIPT_REASONS, ReceiptReason
from bridge.formats.notice import notice
from bridge.formats.reasons import REASONS
from tests.support.samples import EVENTS, NOW, with_data

# Each reason: whether the event is approved by it, and what helps. "no" holds where the decision is made only while
# nothing was POSTed for the command, or IMDS has refused it.
CLAIMS = {
    "approved": ("yes", "nothing"),
    "already_approved": ("yes", "nothing"),
    "not_recorded": ("may", "nothing"),
    "malformed": ("no", "command"),
    "bad_signature": ("no", "command"),
    "expired": ("no", "command"),
    "unknown_event": ("no", "command"),
    "already_started": ("", "nothing"),
    "other_vm": ("no", "command"),
    "advisory": ("", "nothing"),
    "denied": ("no", "nothing"),
    "not_prepared": ("", "program"),
    "imds_refused": ("no", "command"),
    "imds_unavailable": ("no", "command"),
    "unknown_outcome": ("may", "command"),
}
WORDS = {"yes": "Approved: ", "may": "It may be approved", "no": "This did not approve it"}
HELP = {"command": "(a new command|a new id)", "program": "The program runs again"}


def test_the_code_gives_no_reason_that_the_contract_and_the_texts_lack() -> None:
    typed = {reason for part in get_args(ReceiptReason) for reason in get_args(part) or [part]}
    assert typed == {reason for reasons in RECEIPT_REASONS.values() for reason in reasons}
    assert typed == set(REASONS) == set(CLAIMS)


@pytest.mark.parametrize(
    ("outcome", "reason"), [(outcome, one) for outcome, reasons in RECEIPT_REASONS.items() for one in reasons]
)
def test_a_receipt_claims_what_is_known_and_names_the_vm_and_the_type(outcome: str, reason: str) -> None:
    event = with_data(EVENTS[f"approval.{outcome.lower()}"], Reason=reason)
    message = notice(event, now=NOW, zone=None)
    said = f"{message.title}\n{' '.join(message.sentences)}"
    found = (
        {claim for claim, words in WORDS.items() if re.search(words, said)},
        {help_ for help_, words in HELP.items() if re.search(words, said)},
    )
    approved, help_ = CLAIMS[reason]
    assert found == ({approved} - {""}, {help_} - {"nothing"})
    assert ": Reboot of web-0, web-1" in message.title
    assert not message.title.startswith("Approval failed") or approved == "no"
    unknown = with_data(event, EventType=None, Resources=[])
    assert " on web-0" in notice(unknown, now=NOW, zone=None).title
