"""What an event is at a moment; the store derives `due` for it, and everything else follows here."""

from __future__ import annotations

from typing import NamedTuple

DUES = ("overdue", "started", "1h", "later", "gone")


class State(NamedTuple):
    """What an event is.

    Attributes:
        due: one of DUES while it is followed, then ended, away (put away) or left (no longer followed).
        status: as reported; what is put away keeps it.
        starts_at: when it started, or starts at the earliest; None if that is unknown.
        duration_seconds: as reported, -1 or None if it is unknown.
    """

    due: str
    status: str
    starts_at: float | None
    duration_seconds: int | None = None

    @property
    def is_followed(self) -> bool:
        """Whether it is open, and neither put away nor left."""
        return self.due in DUES

    @property
    def is_running(self) -> bool:
        """Whether it has started, and nothing says that it is over."""
        return self.due == "started"

    @property
    def is_due(self) -> bool:
        """Whether its start is ahead, or not missing yet."""
        return self.due in ("1h", "later")

    @property
    def is_overdue(self) -> bool:
        """Whether no start was reported although NotBefore has passed."""
        return self.due == "overdue"

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or its VMs are gone."""
        return self.due in ("gone", "left", "ended")

    @property
    def is_away(self) -> bool:
        """Whether it was put away, and nothing has brought it back."""
        return self.due == "away"

    @property
    def may_be_approved(self) -> bool:
        """Whether Azure waits for NotBefore, or for an approval."""
        return self.status == "Scheduled" and self.due != "ended"

    @property
    def impact_seconds(self) -> int | None:
        """How long its impact is, None if that is unknown."""
        seconds = self.duration_seconds
        return None if seconds is None or seconds < 0 else seconds

    def is_coming(self, now: float) -> bool:
        """Return whether it has not started, as far as it is known; also of one that was put away."""
        return self.status != "Started" and (self.starts_at is None or self.starts_at > now)
