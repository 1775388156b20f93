"""An Event Grid for the lab: a custom topic or a domain, and the topics of a namespace, which keep what they accept.

Statuses, limits and the words that clients look for follow Microsoft Learn (post-to-custom-topic, quotas-limits),
azure-rest-api-specs, and answers in issues of azure-sdk-for-net (10684, 22831, 25510, 43371) and azure-sdk-for-java
(15176). Not simulated: schemas other than CloudEvents, tokens, subscriptions with their delivery, and TLS.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from http.client import responses
from uuid import uuid4

from bridge.lab.httpd import Answer, HttpRequest, json_answer
from bridge.lab.inbox import Inbox, cloud_events, problem

# Constant, so that a configuration written for one run works with the next.
KEYS = tuple(base64.b64encode(f"imds-bridge lab, key {number} of 2".encode()).decode() for number in (1, 2))
# "1 MB" for an event and a batch; a custom topic was seen to accept 1,536,000 bytes, but this is documented.
MAX_BODY_BYTES = 1024 * 1024
CUSTOM_PATH = "/api/events"
NAMESPACE_PATH = re.compile(r"/topics/([^/:]+)(:publish)?")
DOMAIN_TOPIC = re.compile(r"[A-Za-z0-9-]{3,50}")


@dataclass(frozen=True, kw_only=True)
class Flavor:
    """How the two kinds of topic differ."""

    api_version: str
    max_events: int  # per request
    too_large: int  # the status, also for too many events
    invalid_type: int


CUSTOM = Flavor(api_version="2018-01-01", max_events=5000, too_large=413, invalid_type=415)
NAMESPACE = Flavor(api_version="2024-06-01", max_events=1000, too_large=403, invalid_type=400)


class Refusal(Exception):
    """A request is refused: a status and a text."""


def flavor_of(path: str) -> Flavor:
    """Return the kind of topic that a path belongs to."""
    return NAMESPACE if path.startswith("/topics/") else CUSTOM


def is_topic(path: str) -> bool:
    """Return whether the path is one to publish events to."""
    named = NAMESPACE_PATH.fullmatch(path)
    return path == CUSTOM_PATH or (named is not None and named[2] is not None)


class EventGridLab(Inbox):
    """Simulate a custom topic, or a domain, and the topics of a namespace, all with the same keys.

    Every method may be called from any thread. Recording, waiting and faults work as in Inbox; a fault with an
    HTTP status and no body is answered with an error body as the service sends it.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        topics: Sequence[str] = ("maintenance",),
        is_domain: bool = False,
        keys: Sequence[str] = KEYS,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Start the server.

        Args:
            port: 0 for any free port.
            topics: the names of the namespace's topics.
            is_domain: whether the custom topic is a domain, which takes a topic's name as the `source` of events.
            keys: the access keys, two as in the service.
            report: called with a sentence for each request.
        """
        self.keys = tuple(keys)
        self._topics = tuple(topics)
        self._is_domain = is_domain
        super().__init__(port=port, report=report)

    @property
    def url(self) -> str:
        """Return the address of the custom topic."""
        return self.custom_endpoint

    @property
    def custom_endpoint(self) -> str:
        """Return the address of the custom topic, without the api-version."""
        return f"{self.base_url}{CUSTOM_PATH}"

    def namespace_endpoint(self, topic: str) -> str:
        """Return the address of a topic of the namespace, without the api-version."""
        return f"{self.base_url}/topics/{topic}:publish"

    def _handle(self, request: HttpRequest) -> Answer:
        answer = super()._handle(request)
        if answer.status < HTTPStatus.BAD_REQUEST or answer.body:
            return answer
        return _with_error_body(answer, "A fault of the lab.")

    def _answer(self, request: HttpRequest) -> Answer:
        try:
            self._check(request, flavor_of(request.path))
        except Refusal as refusal:
            status, reason = refusal.args
            return _with_error_body(Answer(status=status), reason)
        return Answer() if flavor_of(request.path) is CUSTOM else json_answer({})

    def _check(self, request: HttpRequest, flavor: Flavor) -> None:
        """Raise Refusal for what the service refuses; one invalid event refuses the whole batch."""
        path, version = request.path, ",".join(request.parameters.get("api-version", []))
        if not is_topic(path):
            raise Refusal(404, f"No HTTP resource was found that matches the request URI '{path}'.")
        if version != flavor.api_version:
            raise Refusal(400, f"UnsupportedApiVersion: Unknown api version: {version}")
        if request.method != "POST":
            raise Refusal(405, f"The method {request.method} is not allowed.")
        self._check_credential(request)
        named = NAMESPACE_PATH.fullmatch(path)
        if named and named[1] not in self._topics:
            raise Refusal(410, f"The topic {named[1]} was not found.")
        if len(request.body) > MAX_BODY_BYTES:
            raise Refusal(flavor.too_large, f"The maximum size ({MAX_BODY_BYTES}) has been exceeded.")
        self._check_events(request, flavor)

    def _check_events(self, request: HttpRequest, flavor: Flavor) -> None:
        if found := problem(request):
            status, reason = found
            raise Refusal(flavor.invalid_type if status == HTTPStatus.UNSUPPORTED_MEDIA_TYPE else 400, reason)
        events = cloud_events(request)
        foreign = [one["source"] for one in events if not DOMAIN_TOPIC.fullmatch(one["source"])]
        if self._is_domain and flavor is CUSTOM and foreign:
            raise Refusal(
                400,
                f"Required property 'topic' needs to be the name of the domain topic. Found: {foreign[0]}.",
            )
        count = len(events)
        if count == 0:
            raise Refusal(400, "The JSON received does not conform to the 'CloudEventV10' schema.")
        if count > flavor.max_events:
            limit = f"The maximum number of events ({flavor.max_events}) has been exceeded."
            raise Refusal(flavor.too_large, limit)

    def _check_credential(self, request: HttpRequest) -> None:
        """Raise Refusal without one of the keys, in the header of the kind of topic."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if flavor_of(request.path) is CUSTOM:
            key = request.headers.get("aeg-sas-key", "")
        elif scheme.lower() != "sharedaccesskey":
            key = ""
        if key not in self.keys:
            raise Refusal(401, "The request carries no authorization key of this topic.")


def _with_error_body(answer: Answer, message: str) -> Answer:
    """Return the answer with a body as the service sends it for an error."""
    code = responses.get(answer.status, str(answer.status)).replace(" ", "")
    error = {"code": code, "message": message, "tracking_id": str(uuid4())}
    body = json_answer({"error": error})
    return replace(answer, body=body.body, headers={**body.headers, **answer.headers})
