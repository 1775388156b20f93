"""Keep the faults that are active: for which entity, how often and for how long. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from bridge.lab.httpd import LabError

# ServiceBusLab.fault documents what each kind does.
AT_ONCE = ("drop", "detach")
LASTING = (
    "drop_before_store",
    "drop_after_store",
    "drop_before_settle",
    "drop_after_settle",
    "detach_idle",
    "stall",
    "silent",
    "silent_cbs",
    "refuse_cbs",
    "unauthorized",
    "no_credit",
    "busy",
    "quota",
    "missing",
    "disabled",
)
KINDS = AT_ONCE + LASTING


@dataclass(kw_only=True)
class Fault:
    """Hold one fault.

    Attributes:
        entity: the entity it applies to, with its subscriptions; None for all.
        until: when it ends, by the clock; None for never.
        left: how often it still applies; None for no limit.
        skip: how many operations it lets pass first.
        idle_seconds: for detach_idle, the idle time after which it detaches.
    """

    kind: str
    entity: str | None = None
    until: float | None = None
    left: int | None = None
    skip: int = 0
    idle_seconds: float = 0.0

    def matches(self, entity: str | None) -> bool:
        """Return whether the fault is for this entity."""
        if self.entity is None:
            return True
        return entity is not None and f"{entity}/".startswith(f"{self.entity}/")


class Faults:
    """Hold the lasting faults. Not thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._faults: list[Fault] = []
        self.applied: Counter[str] = Counter()

    def add(self, fault: Fault) -> None:
        """Start a fault."""
        if fault.kind not in KINDS:
            raise LabError(f"fault given: {fault.kind!r}; expected: one of {', '.join(KINDS)}")
        self._faults.append(fault)

    def clear(self, kind: str | None = None) -> None:
        """End all faults, or all of a kind."""
        self._faults = [fault for fault in self._faults if kind is not None and fault.kind != kind]

    def find(self, kind: str, entity: str | None = None) -> Fault | None:
        """Return the active fault of a kind for an entity, without counting it."""
        if not self._faults:
            return None
        self._prune()
        entity = None if entity is None else entity.lower()
        return next((f for f in self._faults if f.kind == kind and f.matches(entity)), None)

    def applies(self, kind: str, entity: str | None = None) -> bool:
        """Return whether a fault applies now, and count it."""
        fault = self.find(kind, entity)
        if fault is None:
            return False
        if fault.skip > 0:
            fault.skip -= 1
            return False
        if fault.left is not None:
            fault.left -= 1
        self.applied[kind] += 1
        return True

    def _prune(self) -> None:
        now = self._clock()
        self._faults = [
            fault
            for fault in self._faults
            if (fault.until is None or fault.until > now) and (fault.left is None or fault.left > 0)
        ]
