"""What the rest of the program needs of IMDS, whoever provides it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from bridge.imds.instance import Vm
from bridge.runtime.json import Json


class Imds(Protocol):
    """The instance metadata service as one VM sees it.

    It is used from one thread at a time, except for `base`, which any thread may read. Every call blocks until there
    is a usable answer or its time limit is over, and asks once: repeating is the caller's decision, as is the limit
    of five requests a second for all processes of the VM together. Every failure is an ImdsError that carries the
    status of the answer and its Retry-After, where there was an answer; the next call may succeed. Nothing else is
    raised for what IMDS does.
    """

    @property
    def base(self) -> str:
        """The address in use, "" before the first call of an implementation that has to look for it."""
        ...

    def document(
        self, *, timeout_seconds: float | None = None, waiting: Callable[[], object] | None = None
    ) -> bytes:
        """Return the Scheduled Events document as received, not checked in any way.

        Args:
            timeout_seconds: the limit; None for 130 s where the service may have to be turned on first, else 10 s.
            waiting: called about once a second while there is no answer; what it raises ends the call.

        Raises:
            ImdsError: no status 200 with a complete body of at most 4 MiB in time.
        """
        ...

    def instance(self) -> Vm:
        """Return who this VM is.

        Raises:
            ImdsError: no readable instance data with a name within 2 s.
        """
        ...

    def approve(self, event_ids: Sequence[str], *, incarnation: Json) -> None:
        """Approve the start of events. IMDS allows it to be repeated.

        Args:
            event_ids: as received in the document; IMDS compares them with their case.
            incarnation: DocumentIncarnation of that document as received; api-version 2017-03-01 asks for it.

        Raises:
            ImdsError: no status 200 within 10 s. `status` 400: IMDS refuses the request, nothing was approved.
                Without a status, the events may have been approved.
        """
        ...

    def close(self) -> None:
        """Close the connection; a later call opens a new one."""
        ...
