"""Where approve commands come from, and what they may do."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from bridge.config.base import Fault, Settings
from bridge.config.bus import ReceiverSettings
from bridge.config.sinks import Program, RunSeconds
from bridge.config.values import SigningSecrets, check_policy_value, check_some, check_template
from bridge.contract.types import KNOWN_VALUES

TURNS_TIMEOUT_SECONDS = 300.0
LEAVE_SPARE_SECONDS = 30.0  # for a process that starts on a busy machine


@dataclass(frozen=True)
class Criterion:
    """What a setting of a rule compares: declared beside it, and read by all that know criteria.

    Attributes:
        of: the property of IMDS.
        kind: whether its value is one of those that the setting lists, whether it has only names that match, or
            whether its number is at least, or at most, that of the setting.
    """

    of: str
    kind: Literal["one of", "names", "least", "most"]


_EventType = Annotated[str, AfterValidator(partial(check_policy_value, known=KNOWN_VALUES["EventType"]))]
_EventSource = Annotated[str, AfterValidator(partial(check_policy_value, known=KNOWN_VALUES["EventSource"]))]
_Some = AfterValidator(check_some)
_NOT_EMPTY: Any = Field(default=(), json_schema_extra={"minItems": 1})
_Duration = Annotated[int | None, Field(ge=0)]
_Notice = Annotated[float | None, Field(allow_inf_nan=False)]


class RuleSettings(Settings):
    """A rule about events: all criteria must match, a list by one of its values."""

    event_type: Annotated[tuple[_EventType, ...], _Some, Criterion("EventType", "one of")] = _NOT_EMPTY
    """The event is of one of these types. Example: `["Freeze", "Reboot"]`."""
    event_source: Annotated[tuple[_EventSource, ...], _Some, Criterion("EventSource", "one of")] = _NOT_EMPTY
    """The event comes from one of these: `Platform` or `User`. Example: `["User"]`."""
    resource: Annotated[tuple[str, ...], _Some, Criterion("Resources", "names")] = _NOT_EMPTY
    """The event's Resources match, in a deny rule at least one of them, else all; `*` and `?` are wildcards.
    Example: `["db-*"]`."""
    min_duration_seconds: Annotated[_Duration, Criterion("DurationInSeconds", "least")] = None
    """The announced duration is at least this. Example: `1`."""
    max_duration_seconds: Annotated[_Duration, Criterion("DurationInSeconds", "most")] = None
    """The announced duration is at most this. Example: `10`."""
    min_notice_seconds: Annotated[_Notice, Criterion("NotBefore", "least")] = None
    """NotBefore is at least this far away. Example: `60`."""
    max_notice_seconds: Annotated[_Notice, Criterion("NotBefore", "most")] = None
    """NotBefore is at most this far away. Example: `300`."""

    def find_faults(self) -> Iterator[Fault]:
        """Yield bounds that contradict each other."""
        yield from super().find_faults()
        for (low, lower), (high, upper) in permutations(self.criteria().items(), 2):
            least, most = getattr(self, low), getattr(self, high)
            if (lower.of, lower.kind, upper.kind) == (upper.of, "least", "most") and least > most:
                yield low, f"given {least:g}, expected at most {high}, which is {most:g}"

    def criteria(self) -> dict[str, Criterion]:
        """Return the criteria that the rule has, by their names."""
        return {name: one for name, one in _CRITERIA.items() if getattr(self, name) not in ((), None)}


# Every setting of a rule is a criterion: one without is found here, when the module is loaded.
_CRITERIA = {
    name: next(one for one in setting.metadata if isinstance(one, Criterion))
    for name, setting in RuleSettings.model_fields.items()
}


def leaving(seconds: float) -> dict[str, tuple[str, ...]]:
    """Return the programs of a rule with `leave_seconds`: one that waits so long, and one that has nothing to do.

    What puts the VM back needs nothing of this version, as it may be owed to the one before.
    """
    python = (sys.executable, "-I")
    return {
        "run": (*python, "-m", "bridge.runtime.leave", f"{seconds:g}"),
        "recover": (*python, "-c", "pass"),
    }


class AutoSettings(RuleSettings):
    """A rule by which events are approved without a command."""

    group: bool = False
    """Whether the rule is also for events of several VMs. With `run`, each VM prepares for them, and none approves
    them; without, the first of Resources approves them at once, each next VM ten seconds later."""
    run: Program = ()
    """A program that prepares the VM: it has to end with exit code 0 before the event is approved. Example:
    `["/usr/local/bin/drain"]`."""
    recover: Program = ()
    """A program that puts the VM back to work once no event is left that `run` was started for; it is repeated
    until it ends with exit code 0. Example: `["/usr/local/bin/recover"]`."""
    leave_seconds: float | None = Field(default=None, gt=0, le=600, allow_inf_nan=False)
    """In place of `run` and `recover`: `/in-service` answers 503 until the event is over, and the VM counts as
    prepared after so long, or 2 s before NotBefore. Example: `20`."""
    run_timeout_seconds: RunSeconds = 600.0
    """How long each of both may run; then as for a sink of kind exec. With `max_unavailable` the default is 300, and
    with `leave_seconds` 30 s more than that. Example: `240`."""
    max_unavailable: int | None = Field(default=None, ge=1)
    """How many VMs of the document may be prepared or approved early at once; later events wait for their turn, at
    most until their program has just enough time. Without it, there is no limit. Example: `1`."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        """Make programs of `leave_seconds`; leave events that take turns most of the 900 s that they usually have."""
        if not isinstance(given, dict):
            return given
        seconds = given.get("leave_seconds")
        if isinstance(seconds, int | float):
            given = {**leaving(seconds), "run_timeout_seconds": seconds + LEAVE_SPARE_SECONDS, **given}
        return (
            {"run_timeout_seconds": TURNS_TIMEOUT_SECONDS, **given} if given.get("max_unavailable") else given
        )

    def find_faults(self) -> Iterator[Fault]:
        """Yield a program that has nothing to put back."""
        yield from super().find_faults()
        if self.recover and not self.run:
            yield "recover", "given, expected only with run"
        if self.leave_seconds is None:
            return
        if {"run": self.run, "recover": self.recover} != leaving(self.leave_seconds):
            yield "leave_seconds", "given beside run or recover, expected one of them"
        if self.run_timeout_seconds <= self.leave_seconds:
            yield (
                "run_timeout_seconds",
                f"given {self.run_timeout_seconds:g}, expected more than leave_seconds",
            )

    def warnings(self) -> Iterator[str]:
        """Yield with which values events hardly wait for their turn, and what puts nothing back."""
        if self.run and not self.recover:
            yield "run: given without recover: once the event is over, nothing puts the VM back to work"
        if not self.run or not self.max_unavailable:
            return
        if self.run_timeout_seconds > TURNS_TIMEOUT_SECONDS:
            yield (
                f"run_timeout_seconds: given {self.run_timeout_seconds:g}, expected at most 300 with "
                "max_unavailable: later, programs start without a turn, as there is just enough time left"
            )
        least = self.run_timeout_seconds + 10
        if self.max_notice_seconds is not None and self.max_notice_seconds <= least:
            yield (
                f"max_notice_seconds: given {self.max_notice_seconds:g}, expected more than {least:g} "
                "(run_timeout_seconds and 10 s) with max_unavailable, or no event waits for its turn"
            )


class PolicySettings(Settings):
    """What commands may approve: deny wins, and what no allow rule matches is denied."""

    scope: Literal["self", "group"] = "self"
    """`self`: this VM must be among the event's Resources; `group`: any VM that sees the event may approve it. A
    Terminate is always `self`."""
    allow: tuple[RuleSettings, ...] = ()
    """Rules of which at least one has to match.
    Example: `[{ event_type = ["Freeze", "Reboot"], max_duration_seconds = 10 }]`."""
    deny: tuple[RuleSettings, ...] = ()
    """Rules of which none may match; a value that the event lacks counts as a match.
    Example: `[{ resource = ["db-*"] }]`."""


class ApprovalSettings(ReceiverSettings):
    """Where approve commands come from, and what may be approved; with auto rules, the bus may be left out."""

    session: Annotated[
        str, AfterValidator(partial(check_template, names=("vm", "resource_group", "subscription")))
    ] = ""
    """The session id that this VM receives, of a queue that requires sessions; it may contain
    `{resource_group}`, `{vm}` and `{subscription}`, in lower case; above 128 characters, it ends with a hash. The
    subscription is needed where VMs that share the queue may agree in the others.
    Example: `"{resource_group}.{vm}"`."""
    grace_seconds: float = Field(default=30.0, ge=0, le=600)
    """How long a command waits for an event that IMDS does not show yet. Example: `60`."""
    signing_secrets: SigningSecrets = None
    """If set, commands need a Standard Webhooks signature; while the file is empty or invalid, every command is
    refused. Example: `"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"`."""
    receipts_topic: str = ""
    """The topic where `approve --wait` looks for its receipts. Example: `"scheduled-events"`."""
    receipts_subscription: str = ""
    """The subscription of `receipts_topic` for `approve --wait` alone: no other consumer and no relay may use it.
    Example: `"receipts"`."""
    policy: PolicySettings = Field(default_factory=PolicySettings)
    """What commands may approve."""
    auto: tuple[AutoSettings, ...] = ()
    """Rules by which events are approved without a command."""

    def find_faults(self) -> Iterator[Fault]:
        """Yield rules that run the same program and put it back in different ways."""
        yield from super().find_faults()
        known: dict[tuple[str, ...], tuple[str, ...]] = {}
        for number, rule in enumerate(self.auto):
            other = known.setdefault(rule.run, rule.recover)
            if rule.run and other != rule.recover:
                given, expected = (list(one) or "none" for one in (rule.recover, other))
                text = f"given {given}, expected {expected}, as the rule before it with the same run"
                yield f"auto[{number}].recover", text

    @property
    def programs(self) -> set[tuple[str, ...]]:
        """The programs of the auto rules."""
        return {program for rule in self.auto for program in (rule.run, rule.recover) if program}

    @property
    def recovers(self) -> Mapping[tuple[str, ...], tuple[str, ...]]:
        """The `recover` of each `run` that has one."""
        return {rule.run: rule.recover for rule in self.auto if rule.recover}

    @property
    def has_bus(self) -> bool:
        """Whether commands come from a bus: without one there are only auto rules."""
        given = (self.namespace, self.connection_string, self.entity, self.subscription)
        return not self.auto or any(given)

    def rules(self) -> Iterator[tuple[str, RuleSettings]]:
        """Yield each rule with its key in the configuration."""
        for key, rules in (
            ("policy.allow", self.policy.allow),
            ("policy.deny", self.policy.deny),
            ("auto", self.auto),
        ):
            for number, rule in enumerate(rules):
                yield f"{key}[{number}]", rule

    def compared_properties(self) -> Iterator[tuple[str, str]]:
        """Yield each criterion's key in the configuration with the property of IMDS that it compares."""
        for key, rule in self.rules():
            for name, criterion in rule.criteria().items():
                yield f"{key}.{name}", criterion.of

    def warnings(self) -> Iterator[str]:
        """Yield what is allowed and hardly meant, with the key that it is about."""
        for key, rule in self.rules():
            if not rule.criteria():
                yield f"{key}: the rule has no criteria and matches every event"
        for number, auto in enumerate(self.auto):
            for warning in auto.warnings():
                yield f"auto[{number}].{warning}"
        if not self.policy.allow and not self.auto:
            yield "policy: no allow rule and no auto rule, so `imds-bridge listen` denies every command"
        if self.queue and not self.session and self.policy.scope == "self":
            yield (
                "session: without sessions, a command reaches any of the listeners that share the queue; "
                'expected a queue with sessions and session = "{resource_group}.{vm}" unless this VM has its own'
            )
