"""What holds for every test here that uses the Service Bus SDK."""

from __future__ import annotations

from tests.support.sdk import sdk_without_pauses

__all__ = ["sdk_without_pauses"]
