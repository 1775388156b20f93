"""Fixtures for every test in this folder."""

from __future__ import annotations

from tests.support.labs import bus, imds, inbox, lab
from tests.support.sdk import sdk_without_pauses

__all__ = ["bus", "imds", "inbox", "lab", "sdk_without_pauses"]
