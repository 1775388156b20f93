"""Fixtures for every test in this folder."""

from __future__ import annotations

from tests.support.labs import bus, imds, inbox
from tests.support.sdk import sdk_without_pauses

__all__ = ["bus", "imds", "inbox", "sdk_without_pauses"]
