"""Every error that imds-bridge raises, in one tree.

BridgeError
├── ConfigError        the settings are wrong                 the process exits 2
├── UsageError         a command was called wrongly           the process exits 2
├── StateError         the state folder cannot be used        the process exits 3
├── Incomplete         `forward --once` did not finish          the process exits 3
├── Stopped            the outbox is closed               ends a thread that nobody waited for
├── HungError          a library's call does not return       retried; the process exits 1 if it is final
├── ImdsError          no valid answer from IMDS              retried, never an exit
└── DeliveryError      a sink did not take an event
├── Unavailable    it may take it later                   retried with backoff
├── Misconfigured  its address or credentials are wrong   retried and logged as an error
├── Rejected       it will never take this event          dead-lettered, the next one follows
└── Gone           it wants no more events                stopped until the process restarts
"""

from __future__ import annotations


class BridgeError(Exception):
    """Anything that imds-bridge raises on purpose; its text is written for an operator."""


class ConfigError(BridgeError):
    """The configuration is wrong; `faults` describes each mistake in one line, `lines` has a heading above them."""

    def __init__(self, source: str, faults: list[str]) -> None:
        self.source = source
        self.faults = faults
        noun = "1 error" if len(faults) == 1 else f"{len(faults)} errors"
        self.lines = [f"{source}: {noun} in the configuration", *(f"  {fault}" for fault in faults)]
        super().__init__("\n".join(self.lines))


class UsageError(BridgeError):
    """A command was given something that it cannot work with."""


class StateError(BridgeError):
    """The state folder is held by another process or belongs to a newer version."""


class Stopped(BridgeError):
    """The process has stopped without waiting longer for this thread, which may do no more."""


class Incomplete(BridgeError):
    """A run that ends on its own has not done everything."""


class HungError(BridgeError):
    """A library's call has not returned in time and was left behind; it is `final` if too many were."""

    def __init__(self, message: str, *, final: bool) -> None:
        super().__init__(message)
        self.final = final


class ImdsError(BridgeError):
    """IMDS gave no valid answer.

    Args:
        message: what happened.
        status: the HTTP status, if there was a response.
        retry_after_seconds: the wait that IMDS asked for, if it did.
    """

    def __init__(
        self, message: str, *, status: int | None = None, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_seconds = retry_after_seconds


class DeliveryError(BridgeError):
    """A sink did not take an event.

    Args:
        message: what happened.
        delivered: how many events at the front of the batch it took; the error is about the next one.
        uncertain: how many events behind those it may have: they were in a request without a clear answer. Only
            a sink whose receiver can refuse what it has (HTTP 409) needs to tell.
        status: the HTTP status, if there was a response.
        retry_after_seconds: the wait that the receiver asked for, if it did.
        is_unreached: whether the receiver did not get the event, so that another event would fail as well.
    """

    def __init__(
        self,
        message: str,
        *,
        delivered: int = 0,
        uncertain: int = 0,
        status: int | None = None,
        retry_after_seconds: float | None = None,
        is_unreached: bool = False,
    ) -> None:
        super().__init__(message)
        self.delivered = delivered
        self.uncertain = uncertain
        self.is_unreached = is_unreached
        self.status = status
        self.retry_after_seconds = retry_after_seconds


class Unavailable(DeliveryError):
    """The receiver cannot take it now, but may later."""


class Misconfigured(DeliveryError):
    """The receiver's address or the credentials are wrong; a changed secret may help."""


class Rejected(DeliveryError):
    """The receiver will never take this event."""


class Gone(DeliveryError):
    """The receiver asks to be sent nothing more (HTTP 410)."""
