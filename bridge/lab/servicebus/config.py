"""Read the configuration file format of the official Service Bus emulator, so that one file works for both."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_pascal

from bridge.lab.httpd import LabError
from bridge.lab.servicebus.filters import Correlation, Filter, Sql, everything

Json = Mapping[str, Any]
Duration = Annotated[timedelta, Field(gt=timedelta(0))]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_./-]*[A-Za-z0-9])?$")]
HOUR = timedelta(hours=1)


class _Model(BaseModel):
    model_config = ConfigDict(alias_generator=to_pascal, validate_by_name=True)


class Properties(_Model):
    """The properties of a queue, a topic or a subscription."""

    lock_duration: Annotated[Duration, Field(le=timedelta(minutes=5))] = timedelta(minutes=1)
    max_delivery_count: Annotated[int, Field(ge=1)] = 10
    default_message_time_to_live: Duration = HOUR
    dead_lettering_on_message_expiration: bool = False
    requires_duplicate_detection: bool = False
    duplicate_detection_history_time_window: Duration = timedelta(seconds=20)
    requires_session: bool = False
    enable_partitioning: bool = False  # as ARM calls it; the emulator has none
    forward_to: Literal["", None] = None  # the lab forwards nothing
    forward_dead_lettered_messages_to: Literal["", None] = None


class QueueSettings(_Model):
    """A queue, or what a subscription keeps."""

    name: Name
    properties: Properties = Properties()


class _SqlFilter(_Model):
    sql_expression: str


class _RuleProperties(_Model):
    filter_type: Literal["Sql", "Correlation"]
    sql_filter: _SqlFilter | None = None
    correlation_filter: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.compiled()
        return self

    def compiled(self) -> Filter:
        """Return the condition; raise LabError if it is invalid."""
        if self.filter_type == "Sql" and self.sql_filter:
            return Sql(self.sql_filter.sql_expression)
        return Correlation(self.correlation_filter or {})


class _Rule(_Model):
    name: str = ""
    properties: _RuleProperties


class SubscriptionSettings(QueueSettings):
    """A subscription and its rules, one of which must match."""

    rules: list[_Rule] = []

    def filters(self) -> list[Filter]:
        """Return the conditions of its rules."""
        return [rule.properties.compiled() for rule in self.rules] or [everything]


class TopicSettings(QueueSettings):
    """A topic and its subscriptions."""

    subscriptions: list[SubscriptionSettings] = []


class Namespace(_Model):
    """All entities."""

    queues: list[QueueSettings] = []
    topics: list[TopicSettings] = []


class _UserConfig(_Model):
    namespaces: Annotated[list[Namespace], Field(min_length=1, max_length=1)]


class _File(_Model):
    user_config: _UserConfig


def load(source: str | Path | Json) -> Namespace:
    """Return the namespace of a configuration file, or of its content; raise LabError if it is invalid."""
    try:
        if isinstance(source, Mapping):
            return _File.model_validate(source).user_config.namespaces[0]
        text = Path(source).read_text(encoding="utf-8-sig")
        return _File.model_validate_json(text).user_config.namespaces[0]
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise LabError(
            f"bus configuration given: {source}; expected: the emulator's JSON ({error})"
        ) from error
