"""Decide which requests Event Grid refuses, and with which answer. No I/O.

Sources, by the marks in the comments:
[L] Microsoft Learn, post-to-custom-topic and quotas-limits. [R] azure-rest-api-specs, the namespace's publish
operation. [S] tests of Microsoft's SDKs against the service. [I] answers shown in issues of azure-sdk-for-net
(10684, 22831, 43371) and azure-sdk-for-java (15176). [P] what the project AzureEventGridSimulator reports about
the service. "Chosen": no source was found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from http import HTTPStatus
from http.client import responses

from bridge.lab.httpd import HttpRequest
from bridge.lab.inbox import cloud_events, problem

# [L] "1 MB" for an event and a batch. [S] a custom topic accepts 1,536,000 bytes; the documented limit applies here.
MAX_BODY_BYTES = 1024 * 1024
CUSTOM_PATH = "/api/events"
NAMESPACE_PATH = re.compile(r"/topics/([^/:]+)(:publish)?")


@dataclass(frozen=True, kw_only=True)
class Flavor:
    """Describe how the two kinds of topic differ."""

    api_version: str
    max_events: int  # [L] per request
    too_large: int  # the status, also for too many events
    unknown_version: str
    no_credential: str
    invalid_type: tuple[int, str, str]  # status, code among the details, message
    attributes: tuple[str, ...]  # required, in the order in which the service checks them
    missing: str  # the message where `{}` is missing or empty


CUSTOM = Flavor(
    api_version="2018-01-01",
    max_events=5000,
    too_large=413,  # [L]
    # chosen: the text of ASP.NET API Versioning, whose header api-supported-versions the service sends [P]
    unknown_version="The HTTP resource that matches the request URI does not support the API version '{}'.",
    no_credential=(  # [P], and in Microsoft's Python SDK
        "Request must contain one of the following authorization signature: aeg-sas-token, aeg-sas-key."
    ),
    invalid_type=(  # [I]
        415,
        "InvalidContentType",
        "The Content-Type header is either missing or it doesn't have a valid value. The content type header "
        "must either be application/cloudevents+json; charset=utf-8 or application/cloudevents-batch+json; "
        "charset=UTF-8.",
    ),
    attributes=("specversion", "type", "source", "id"),  # [P]
    missing="This resource is configured for 'CloudEventV10' schema and requires '{}' property to be set.",  # [P]
)
NAMESPACE = Flavor(
    api_version="2024-06-01",
    max_events=1000,
    too_large=403,  # [R] "quota exceeded or message is too large"
    unknown_version="Unknown api version: {}",  # [I] the text; the status is chosen
    no_credential="The request carries neither a SharedAccessKey nor a Bearer token.",  # chosen
    invalid_type=(400, "", "CONTENT-TYPE is not provided or not supported"),  # [S] for none; else chosen
    attributes=("id", "source", "specversion", "type"),  # [S] that id comes first
    missing="`{}` must be non-empty string",  # [S]
)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Hold the status and the text of an error."""

    status: int
    message: str
    detail: str = ""  # the code among the details of a custom topic; empty: the code of the status

    @property
    def code(self) -> str:
        """Return the error code for the status, such as BadRequest."""
        if self.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            return "RequestEntityTooLarge"  # [P]; Python's own name for it depends on its version
        return responses.get(self.status, str(self.status)).replace(" ", "")


def flavor_of(path: str) -> Flavor:
    """Return the kind of topic that a path belongs to."""
    return NAMESPACE if path.startswith("/topics/") else CUSTOM


def is_topic(path: str) -> bool:
    """Return whether the path is one to publish events to."""
    named = NAMESPACE_PATH.fullmatch(path)
    return path == CUSTOM_PATH or (named is not None and named[2] is not None)


def refusal(
    request: HttpRequest, *, topics: Collection[str], credential: Callable[[HttpRequest], Refusal | None]
) -> Refusal | None:
    """Return how the service refuses the request, or None; one invalid event refuses the whole batch.

    Args:
        request: any request.
        topics: the names of the namespace's topics.
        credential: judges the key or token of the request.
    """
    flavor = flavor_of(request.path)
    # the order is chosen, except that the version is checked early [I]
    checks: tuple[Callable[[], Refusal | None], ...] = (
        lambda: _address_refusal(flavor, request),
        lambda: credential(request),
        lambda: _topic_refusal(request, topics),
        lambda: _content_refusal(flavor, request),
    )
    return next((found for check in checks if (found := check())), None)


def _address_refusal(flavor: Flavor, request: HttpRequest) -> Refusal | None:
    not_found = Refusal(  # [I]; chosen for a namespace, but the status [I]
        status=404,
        message=f"No HTTP resource was found that matches the request URI '{request.path}'.",
        detail="ResourceNotFound",
    )
    if flavor is CUSTOM and request.path != CUSTOM_PATH:
        return not_found
    version = ",".join(request.parameters.get("api-version", []))
    if version != flavor.api_version:
        return Refusal(
            status=400, message=flavor.unknown_version.format(version), detail="UnsupportedApiVersion"
        )
    if not is_topic(request.path):
        return not_found
    if request.method != "POST":  # [P] the status
        return Refusal(status=405, message=f"The method {request.method} is not allowed.")
    return None


def key_refusal(request: HttpRequest, keys: Collection[str]) -> Refusal | None:
    """Return how the service refuses the key of a request, or None."""
    flavor = flavor_of(request.path)
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if flavor is CUSTOM:
        key = request.headers.get("aeg-sas-key")
    else:
        key = value if scheme.lower() == "sharedaccesskey" else None
    if key is None:
        return Refusal(status=401, message=flavor.no_credential)
    if key not in keys:  # [S]; the text is chosen for a namespace
        host = request.headers.get("host", "").upper()
        return Refusal(status=401, message=f"The request authorization key is not authorized for {host}.")
    return None


def _topic_refusal(request: HttpRequest, topics: Collection[str]) -> Refusal | None:
    named = NAMESPACE_PATH.fullmatch(request.path)
    if named and named[1] not in topics:  # [R] the status; the text is chosen
        return Refusal(status=410, message=f"The topic {named[1]} was not found.")
    return None


def _content_refusal(flavor: Flavor, request: HttpRequest) -> Refusal | None:
    if len(request.body) > MAX_BODY_BYTES:
        return _too_large(flavor, f"The maximum size ({MAX_BODY_BYTES}) has been exceeded.")  # [S]
    events = cloud_events(request)
    found = problem(request)
    if found and found[0] == HTTPStatus.UNSUPPORTED_MEDIA_TYPE:
        status, detail, message = flavor.invalid_type
        return Refusal(status=status, message=message, detail=detail)
    if found:
        reason = _missing_attribute(flavor, events) or found[1]  # chosen for other errors
        return Refusal(status=400, message=reason, detail="InputJsonInvalid")
    if not events:  # [P]; chosen for a namespace
        return Refusal(
            status=400,
            message="This resource is configured to receive event in 'CloudEventV10' schema. The JSON received "
            "does not conform to the expected schema.",
            detail="InputJsonInvalid",
        )
    if len(events) > flavor.max_events:  # chosen
        return _too_large(flavor, f"The maximum number of events ({flavor.max_events}) has been exceeded.")
    return None


def _too_large(flavor: Flavor, message: str) -> Refusal:
    return Refusal(status=flavor.too_large, message=message, detail="PayloadTooLarge")


def _missing_attribute(flavor: Flavor, events: list[dict[str, object]]) -> str:
    for event in events:
        for name in flavor.attributes:
            if not isinstance(event.get(name), str) or not event[name]:
                shown = "eventType" if flavor is CUSTOM and name == "type" else name  # [P]
                return flavor.missing.format(shown)
    return ""
