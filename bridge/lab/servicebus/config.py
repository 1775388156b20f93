"""Read the configuration file format of the official Service Bus emulator, so that one file works for both."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.lab.httpd import LabError
from bridge.lab.servicebus.filters import EVERYTHING, SYSTEM_PROPERTIES, Correlation, Filter, Rule, Sql

Json = Mapping[str, Any]

_DURATION = re.compile(
    r"P(?:(\d+)Y)?(?:(\d+)M)?(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?)?", re.ASCII
)
_UNIT_SECONDS = (365 * 86400, 30 * 86400, 86400, 3600, 60, 1)
_NAME = re.compile(r"[A-Za-z0-9](?:[\w./-]*[A-Za-z0-9])?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class QueueSettings:
    """Hold the settings of a queue, or of a subscription's messages.

    Attributes:
        name: as clients address it; a subscription's name includes its topic.
        ttl_seconds: the time to live of a message without a shorter one.
        duplicate_window_seconds: None without duplicate detection.
    """

    name: str
    lock_seconds: float = 60.0
    max_delivery_count: int = 10
    ttl_seconds: float = 3600.0
    dead_letter_on_expiration: bool = False
    duplicate_window_seconds: float | None = None
    requires_session: bool = False


@dataclass(frozen=True, kw_only=True)
class SubscriptionSettings:
    """Hold a subscription: its queue settings, and its rules, one of which must match."""

    queue: QueueSettings
    rules: tuple[Rule, ...] = (EVERYTHING,)


@dataclass(frozen=True, kw_only=True)
class TopicSettings:
    """Hold a topic and its subscriptions."""

    name: str
    ttl_seconds: float = 3600.0
    duplicate_window_seconds: float | None = None
    subscriptions: tuple[SubscriptionSettings, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """Hold all entities, and a warning for each setting that the lab ignores."""

    queues: tuple[QueueSettings, ...] = ()
    topics: tuple[TopicSettings, ...] = ()
    ignored: tuple[str, ...] = ()


def load(source: str | Path | Json) -> Namespace:
    """Return the namespace of a configuration file, or of its content; raise LabError if it is invalid."""
    return parse(source if isinstance(source, Mapping) else _read(Path(source)))


def _read(path: Path) -> Json:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise LabError(f"configuration {path} given: {error}; expected: the emulator's JSON") from error
    if not isinstance(content, dict):
        raise LabError(f"configuration {path} given: no object; expected: the emulator's JSON")
    return content


def parse(content: Json) -> Namespace:
    """Return the namespace in a file's content."""
    try:
        namespaces = content["UserConfig"]["Namespaces"]
        if len(namespaces) != 1:
            raise LabError(f"Namespaces given: {len(namespaces)}; expected: 1")
        queues = tuple(queue_settings(one) for one in namespaces[0].get("Queues") or ())
        topics = tuple(topic_settings(one) for one in namespaces[0].get("Topics") or ())
        ignored = tuple(_ignored(namespaces[0]))
    except (KeyError, TypeError, AttributeError) as error:
        raise LabError(
            f"configuration given: {error!r}; expected: UserConfig.Namespaces[0].Queues/Topics"
        ) from error
    _refuse_repeats([queue.name for queue in queues] + [topic.name for topic in topics])
    return Namespace(queues=queues, topics=topics, ignored=ignored)


def queue_settings(content: Json, prefix: str = "") -> QueueSettings:
    """Return the settings of one entry of Queues, or with a prefix of Subscriptions."""
    properties = content.get("Properties") or {}
    name = prefix + _name(content)
    for forward in ("ForwardTo", "ForwardDeadLetteredMessagesTo"):
        if properties.get(forward):
            raise LabError(
                f"{name}: {forward} given: {properties[forward]!r}; expected: none, the lab forwards nothing"
            )
    return QueueSettings(
        name=name,
        lock_seconds=_seconds(properties, "LockDuration", 60.0),
        max_delivery_count=int(properties.get("MaxDeliveryCount", 10)),
        ttl_seconds=_seconds(properties, "DefaultMessageTimeToLive", 3600.0),
        dead_letter_on_expiration=bool(properties.get("DeadLetteringOnMessageExpiration", False)),
        duplicate_window_seconds=_window(properties),
        requires_session=bool(properties.get("RequiresSession", False)),
    )


def topic_settings(content: Json) -> TopicSettings:
    """Return the settings of one entry of Topics."""
    properties = content.get("Properties") or {}
    name = _name(content)
    subscriptions = tuple(_subscription(one, name) for one in content.get("Subscriptions") or ())
    _refuse_repeats([subscription.queue.name for subscription in subscriptions])
    return TopicSettings(
        name=name,
        ttl_seconds=_seconds(properties, "DefaultMessageTimeToLive", 3600.0),
        duplicate_window_seconds=_window(properties),
        subscriptions=subscriptions,
    )


def _subscription(content: Json, topic: str) -> SubscriptionSettings:
    queue = queue_settings(content, f"{topic}/Subscriptions/")
    rules = tuple(_rule(rule, queue.name) for rule in content.get("Rules") or ())
    return SubscriptionSettings(queue=queue, rules=rules or (EVERYTHING,))


def _rule(content: Json, subscription: str) -> Rule:
    return Rule(name=str(content.get("Name", "")), matches=_filter(content["Properties"], subscription))


def _filter(properties: Json, subscription: str) -> Filter:
    kind = properties.get("FilterType")
    if kind == "Sql":
        return Sql(properties["SqlFilter"]["SqlExpression"])
    if kind == "Correlation":
        return _correlation(properties["CorrelationFilter"])
    raise LabError(f"{subscription}: FilterType given: {kind!r}; expected: Sql or Correlation")


def _correlation(content: Json) -> Correlation:
    system = {}
    for name, value in content.items():
        if name == "Properties":
            continue
        if name.lower() not in SYSTEM_PROPERTIES:
            raise LabError(f"CorrelationFilter given: {name}; expected: a property of the message")
        system[SYSTEM_PROPERTIES[name.lower()]] = value
    return Correlation(system=system, application=dict(content.get("Properties") or {}))


def _ignored(namespace: Json) -> list[str]:
    return [
        f"{topic['Name']}/Subscriptions/{subscription['Name']}: the Action of rule {rule.get('Name')!r} is not run"
        for topic in namespace.get("Topics") or ()
        for subscription in topic.get("Subscriptions") or ()
        for rule in subscription.get("Rules") or ()
        if (rule["Properties"].get("Action") or {}).get("SqlExpression")
    ]


def _name(content: Json) -> str:
    name = content.get("Name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise LabError(f"Name given: {name!r}; expected: letters, digits, and . - _ / between them")
    return name


def _window(properties: Json) -> float | None:
    if not properties.get("RequiresDuplicateDetection", False):
        return None
    return _seconds(properties, "DuplicateDetectionHistoryTimeWindow", 20.0)


def _seconds(properties: Json, name: str, default: float) -> float:
    given = properties.get(name)
    if given is None:
        return default
    match = _DURATION.fullmatch(given) if isinstance(given, str) else None
    if match is None or not any(match.groups()):
        raise LabError(f"{name} given: {given!r}; expected: an ISO 8601 duration such as PT1M")
    return sum(float(part or 0) * unit for part, unit in zip(match.groups(), _UNIT_SECONDS, strict=True))


def _refuse_repeats(names: list[str]) -> None:
    folded = [name.lower() for name in names]
    repeated = sorted({name for name in folded if folded.count(name) > 1})
    if repeated:
        raise LabError(f"entities given twice: {', '.join(repeated)}; expected: each once")
