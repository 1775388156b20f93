"""Where approve commands come from, and what they may do."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from bridge.config.base import Secret, Settings
from bridge.config.bus import ReceiverSettings
from bridge.config.validators import (
    check_policy_value,
    check_signing_secrets,
    check_template,
    join_signing_secrets,
)
from bridge.contract.types import KNOWN_VALUES

_EventType = Annotated[str, AfterValidator(partial(check_policy_value, known=KNOWN_VALUES["EventType"]))]
_EventSource = Annotated[str, AfterValidator(partial(check_policy_value, known=KNOWN_VALUES["EventSource"]))]


class RuleSettings(Settings):
    """One rule about events: all that it names must hold. Lists offer alternatives; `resource` takes * and ?."""

    event_type: tuple[_EventType, ...] = ()
    event_source: tuple[_EventSource, ...] = ()
    resource: tuple[str, ...] = ()
    min_duration_seconds: int | None = Field(default=None, ge=0)
    max_duration_seconds: int | None = Field(default=None, ge=0)
    min_notice_seconds: float | None = None
    max_notice_seconds: float | None = None


class AutoSettings(RuleSettings):
    """A rule by which events are approved without a command.

    `group` also takes events that concern other VMs: the first of Resources approves at once, each next one
    ten seconds later.
    """

    group: bool = False


class PolicySettings(Settings):
    """What commands may approve: deny wins, and what no allow rule matches is denied."""

    scope: Literal["self", "group"] = "self"
    allow: tuple[RuleSettings, ...] = ()
    deny: tuple[RuleSettings, ...] = ()


class ApprovalSettings(ReceiverSettings):
    """Where approve commands come from, and what they may do.

    `session` is a template of {resource_group} and {vm}, in lower case. With `signing_secrets`, one a line, a
    command needs a Standard Webhooks signature. A command for an event that is not in the document
    yet waits for `grace_seconds`. `receipts_subscription` is where `approve --wait` looks for the receipt.
    """

    session: str = ""
    grace_seconds: float = Field(default=30.0, ge=0, le=600)
    signing_secrets: Secret | None = None
    receipts_topic: str = ""
    receipts_subscription: str = ""
    policy: PolicySettings = Field(default_factory=PolicySettings)
    auto: tuple[AutoSettings, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _join_secrets(cls, given: Any) -> Any:
        return join_signing_secrets(given)

    @field_validator("session")
    @classmethod
    def _check_session(cls, value: str) -> str:
        return check_template(value, ("vm", "resource_group"))

    @model_validator(mode="after")
    def _check_approvals(self) -> ApprovalSettings:
        if self.signing_secrets:
            check_signing_secrets(self.signing_secrets.read())
        return self
