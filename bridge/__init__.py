"""Publish every change of Azure's Scheduled Events as CloudEvents, and approve events over a bus."""

__version__ = "0.1.0"
