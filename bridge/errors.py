"""Every error that imds-bridge raises, in one tree.

    BridgeError
    ├── ConfigError        the settings are wrong                 the process exits 2
    ├── UsageError         a command was called wrongly           the process exits 2
    ├── StateError         the state folder cannot be used        the process exits 3
    ├── HungError          a library's call does not return  tried afresh, or the process exits 1 when final
    ├── HttpFailure        no HTTP answer came            mapped to one of the two below
    ├── ImdsError          no usable answer from IMDS             asked again, never an exit
    └── DeliveryError      a sink did not take an event
        ├── Unavailable    it may take it later                   sent again with backoff
        ├── Misconfigured  its address or credentials are wrong   sent again, loudly, secrets read anew
        ├── Rejected       it will never take this event          dead-lettered, the next one goes on
        └── Gone           it wants no more events                stopped until the process restarts

`retryable` says whether doing the same again can help.
"""

from __future__ import annotations


class BridgeError(Exception):
    """Anything that imds-bridge raises on purpose; its text is written for an operator."""

    retryable = False


class ConfigError(BridgeError):
    """The configuration is wrong; `faults` names each mistake on a line of its own."""

    def __init__(self, source: str, faults: list[str]) -> None:
        self.source = source
        self.faults = faults
        noun = "1 error" if len(faults) == 1 else f"{len(faults)} errors"
        super().__init__(f"{source}: {noun} in the configuration\n" + "\n".join(f"  {f}" for f in faults))


class SecretFault(str):
    """A fault of the configuration that matters only to whoever needs the secret."""

    __slots__ = ()


class UsageError(BridgeError):
    """A command was given something that it cannot work with."""


class StateError(BridgeError):
    """The state folder is held by another process or belongs to a newer version."""


class HungError(BridgeError):
    """A library's call has not returned in time and was left behind; `final`: too many were."""

    retryable = True

    def __init__(self, message: str, *, final: bool) -> None:
        super().__init__(message)
        self.final = final


class HttpFailure(BridgeError):
    """No usable HTTP answer came.

    `permanent` when the address or TLS is at fault rather than the moment; `unreached` when there was not even a
    connection.
    """

    retryable = True

    def __init__(self, message: str, *, permanent: bool = False, unreached: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent
        self.unreached = unreached


class ImdsError(BridgeError):
    """IMDS gave no usable answer; `retry_after_seconds` is what it asked for, if it did."""

    retryable = True

    def __init__(
        self, message: str, *, status: int | None = None, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_seconds = retry_after_seconds


class DeliveryError(BridgeError):
    """A sink did not take an event.

    `delivered` counts the events at the front of the batch that it did take; the error is about the next
    one. `retry_after_seconds` is how long the receiver asked to be left alone, if it did.
    """

    def __init__(
        self,
        message: str,
        *,
        delivered: int = 0,
        status: int | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.delivered = delivered
        self.status = status
        self.retry_after_seconds = retry_after_seconds


class Unavailable(DeliveryError):
    """The receiver cannot take it now; sending again later can help."""

    retryable = True


class Misconfigured(DeliveryError):
    """The receiver's address or the credentials are wrong; a changed secret or address can help."""

    retryable = True


class Rejected(DeliveryError):
    """The receiver will never take this event."""


class Gone(DeliveryError):
    """The receiver asks to be sent nothing any more (HTTP 410)."""
