"""IMDS in memory, for tests of whoever uses it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bridge.errors import ImdsError
from bridge.imds.instance import Vm
from bridge.runtime.json import Json

BASE = "http://imds.invalid"


@dataclass(frozen=True, kw_only=True)
class ImdsCall:
    """A call as it was made: the method's name and its arguments."""

    method: str
    timeout_seconds: float | None = None
    event_ids: tuple[str, ...] = ()
    incarnation: Json = None


@dataclass(kw_only=True)
class _Fault:
    error: ImdsError
    methods: tuple[str, ...]
    left: int | None


class ImdsDouble:
    """Answers with a document, instance data and faults that a test sets, and records every call.

    `calls` has every call, `approved` the EventIds of the approvals that did not fail.

    Args:
        vm: the instance data.
        document: the first answer; see `serve`.
    """

    def __init__(self, *, vm: Vm | None = None, document: Mapping[str, Json] | bytes | None = None) -> None:
        self.base = BASE
        self.vm = vm or Vm(name="web-0", vm_id="13f56399-bd52-4150-9748-7190aae1ff21")
        self.calls: list[ImdsCall] = []
        self.approved: list[str] = []
        self.is_closed = False
        self._faults: list[_Fault] = []
        self._body = b""
        self.serve({"DocumentIncarnation": 1, "Events": []} if document is None else document)

    def serve(self, document: Mapping[str, Json] | bytes) -> None:
        """Answer with this document from now on; bytes are sent as they are."""
        self._body = document if isinstance(document, bytes) else json.dumps(document).encode()

    def fail(
        self,
        error: ImdsError | int,
        *,
        methods: Sequence[str] = ("document", "instance", "approve"),
        count: int | None = None,
    ) -> None:
        """Let calls fail from now on.

        Args:
            error: what they raise, or the status that IMDS answers.
            methods: the names of the methods that fail.
            count: how many calls fail; None for every call until `restore`.
        """
        raised = (
            ImdsError(f"IMDS at {self.base} answered {error}", status=error)
            if isinstance(error, int)
            else error
        )
        self._faults.append(_Fault(error=raised, methods=tuple(methods), left=count))

    def restore(self) -> None:
        """End all faults."""
        self._faults.clear()

    def document(
        self, *, timeout_seconds: float | None = None, waiting: Callable[[], object] | None = None
    ) -> bytes:
        """Return the document that was set."""
        del waiting  # there is always an answer, or a fault
        self._record(ImdsCall(method="document", timeout_seconds=timeout_seconds))
        return self._body

    def instance(self) -> Vm:
        """Return the instance data that was set."""
        self._record(ImdsCall(method="instance"))
        return self.vm

    def approve(self, event_ids: Sequence[str], *, incarnation: Json) -> None:
        """Record an approval."""
        self._record(ImdsCall(method="approve", event_ids=tuple(event_ids), incarnation=incarnation))
        self.approved += event_ids

    def close(self) -> None:
        """Record that the connection was closed."""
        self.is_closed = True

    def _record(self, call: ImdsCall) -> None:
        self.is_closed = False
        self.calls.append(call)
        for fault in self._faults:
            if call.method in fault.methods and fault.left != 0:
                fault.left = None if fault.left is None else fault.left - 1
                raise fault.error
