"""`/ingest`: CloudEvents over HTTP, acknowledged when they are committed."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from urllib.parse import unquote

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from bridge.config.console import ConsoleSettings
from bridge.console.access import sender_fault
from bridge.console.received import Received, receive
from bridge.console.writer import RETRY_AFTER_SECONDS, Writer
from bridge.errors import Unavailable
from bridge.events.envelope import MAX_BODY_BYTES, decode_event, decoder
from bridge.runtime.json import Json
from bridge.runtime.time import Clock, RepeatLimit

log = logging.getLogger(__name__)

SMALL_BYTES = 64 * 1024
MAX_LARGE = 8  # larger bodies are read at the same time; others wait
_LARGE_BYTES = 256 * 1024
BODY_SECONDS = 15.0
_HANDSHAKE = "SubscriptionValidation"
_CODE = re.compile(r"[A-Za-z0-9-]{1,100}")
_ORIGIN = re.compile(r"[A-Za-z0-9.:/_-]{1,200}")
STRUCTURED, BATCH = "application/cloudevents+json", "application/cloudevents-batch+json"
EXPECTED = (
    f"expected CloudEvents: Content-Type {STRUCTURED} or {BATCH}, or ce- headers (binary mode); "
    "https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/bindings/http-protocol-binding.md"
)
MAX_BATCH_EVENTS = 5000  # what Event Grid sends at most
_encode = json.JSONEncoder(separators=(",", ":")).encode


class Ingest:
    """Takes events from webhook sinks and from Event Grid; for the thread of the event loop."""

    def __init__(self, settings: ConsoleSettings, *, writer: Writer, clock: Clock) -> None:
        """Prepare to take events.

        Args:
            settings: what senders have to show.
            writer: commits.
            clock: dates events, and judges the age of signatures.
        """
        self._settings = settings
        self.writer = writer
        self._clock = clock
        self._large = asyncio.Semaphore(MAX_LARGE)
        self._secret_log_limit = RepeatLimit(clock)
        self._log_limits: dict[HTTPStatus, RepeatLimit] = {}

    async def options(self, http: HttpRequest) -> Response:
        """Consent to deliveries (CloudEvents webhook handshake, also Event Grid's): each is still authenticated."""
        origin = http.headers.get("webhook-request-origin", "")
        headers = {"Allow": "POST, OPTIONS"}
        if _ORIGIN.fullmatch(origin):
            headers |= {"WebHook-Allowed-Origin": origin, "WebHook-Allowed-Rate": "*"}
        return Response(status_code=HTTPStatus.OK, headers=headers)

    async def post(self, http: HttpRequest) -> Response:
        """Commit the events of a request."""
        try:
            return await self._post(http)
        except HTTPException as refused:
            status = HTTPStatus(refused.status_code)
            if self._log_limits.setdefault(status, RepeatLimit(self._clock)).is_due():
                log.warning("events are refused: %s", refused.detail, extra={"status": status})
            return JSONResponse({"error": refused.detail}, status, refused.headers)

    async def _post(self, http: HttpRequest) -> Response:
        if not self._settings.takes_ingest:
            raise HTTPException(
                HTTPStatus.FORBIDDEN, "there is no bearer_token or signing_secret in [console.ingest]"
            )
        if "origin" in http.headers:
            raise HTTPException(HTTPStatus.FORBIDDEN, "browsers may not send events")
        if http.headers.get("content-encoding", "identity").lower() != "identity":
            raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "expected a body without Content-Encoding")
        if http.headers.get("aeg-event-type") == _HANDSHAKE:
            return JSONResponse({"validationResponse": _validation_code(await self.read(http, SMALL_BYTES))})
        needs_body = self._settings.ingest.signing_secrets is not None
        if not needs_body:
            self._authenticate(http, b"")
        declared = http.headers.get("content-length", "")
        is_small = declared.isdigit() and int(declared) <= SMALL_BYTES
        async with nullcontext() if is_small else self._large:
            body = await self.read(http, MAX_BODY_BYTES)
            if needs_body:
                self._authenticate(http, body)
            return await self._commit(http, body)

    async def read(self, http: HttpRequest, max_bytes: int) -> bytes:
        """Read a body within limits.

        Raises:
            HTTPException: it is larger, does not arrive in time, or breaks off.
        """
        declared, parts, size = http.headers.get("content-length", ""), [], 0
        too_large = HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"expected at most {max_bytes} bytes")
        if declared.isdigit() and int(declared) > max_bytes:
            raise too_large
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in http.stream():
                    size += len(part)
                    if size > max_bytes:
                        raise too_large
                    parts.append(part)
        except TimeoutError:
            raise HTTPException(HTTPStatus.REQUEST_TIMEOUT, "the body did not arrive in time") from None
        except ClientDisconnect:
            raise HTTPException(HTTPStatus.BAD_REQUEST, "the request was not completed") from None
        return b"".join(parts)

    async def commit(self, events: Sequence[Received]) -> None:
        """Have events committed.

        Raises:
            HTTPException: they cannot be, now or ever.
        """
        try:
            await asyncio.wrap_future(self.writer.submit(events))
        except ValueError as error:
            raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from None
        except Unavailable as error:
            raise _busy(str(error)) from None

    def _authenticate(self, http: HttpRequest, body: bytes) -> None:
        try:
            fault = sender_fault(self._settings.ingest, http.headers, body, self._clock.now())
        except (OSError, ValueError) as error:
            if self._secret_log_limit.is_due():
                log.error("a secret of [console.ingest] cannot be read: %s", error)  # noqa: TRY400 - the text is enough
            raise _busy("senders cannot be authenticated at the moment") from None
        if fault:
            raise HTTPException(HTTPStatus.UNAUTHORIZED, fault, {"WWW-Authenticate": "Bearer"})

    async def _commit(self, http: HttpRequest, body: bytes) -> Response:
        read = partial(read_events, http.headers, body, now=self._clock.wall())
        try:
            content = await run_in_threadpool(read) if len(body) > _LARGE_BYTES else read()
        except ValueError as error:
            raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from None
        if content.events:
            await self.commit(content.events)
        if content.faults:  # the sender finds out which one it is by sending halves, or gives the batch up
            raise HTTPException(
                HTTPStatus.BAD_REQUEST, f"{content.faults[0]}; {len(content.events)} others were accepted"
            )
        return JSONResponse({"accepted": len(content.events), "ignored": content.ignored})


def _validation_code(body: bytes) -> str:
    """Return the code that Event Grid's handshake wants back; it proves only that events can be sent here."""
    try:
        code = json.loads(body)[0]["data"]["validationCode"]
    except (ValueError, LookupError, TypeError):
        code = None
    if not isinstance(code, str) or not _CODE.fullmatch(code):
        raise HTTPException(
            HTTPStatus.BAD_REQUEST, "expected a SubscriptionValidationEvent with a validationCode"
        )
    return code


def _busy(text: str) -> HTTPException:
    headers = {"Retry-After": f"{RETRY_AFTER_SECONDS:.0f}"}
    return HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, text, headers)


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a request holds: events of imds-bridge, how many others, and what is wrong with those that are invalid."""

    events: list[Received]
    ignored: int
    faults: list[str]


def read_events(headers: Mapping[str, str], body: bytes, *, now: float) -> Content:
    """Read the events of a request.

    Args:
        headers: with names in lower case.
        body: as received.
        now: seconds since 1970.

    Raises:
        HTTPException: the content type is another one.
        ValueError: it is not valid, or has too much.
    """
    faults: list[str] = []
    found: list[Received | None] = []
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type == STRUCTURED:
        found = [receive(decode_event(body), body, now=now)]
    elif content_type == BATCH:
        for number, given in enumerate(_decode_batch(body)):
            try:
                found.append(_receive_one(given, now))
            except ValueError as error:
                faults.append(f"event {number} of the batch: {error}")
    elif "ce-specversion" in headers:
        found = [_receive_one(_decode_binary(headers, content_type, body), now)]
    else:
        raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, EXPECTED)
    return Content(events=[event for event in found if event], ignored=found.count(None), faults=faults)


def _receive_one(given: Json, now: float) -> Received | None:
    if not isinstance(given, dict):
        raise ValueError("it is not an object")
    return receive(given, _encode(given).encode("ascii"), now=now)


def _decode_batch(body: bytes) -> list[Json]:
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"{len(body)} bytes, expected at most {MAX_BODY_BYTES}")
    batch = decoder.decode(body.decode("utf-8"))
    if not isinstance(batch, list) or len(batch) > MAX_BATCH_EVENTS:
        raise ValueError(f"expected a list of at most {MAX_BATCH_EVENTS} events")
    return batch


def _decode_binary(headers: Mapping[str, str], content_type: str, body: bytes) -> dict[str, Json]:
    given: dict[str, Json] = {
        name.removeprefix("ce-"): unquote(value) for name, value in headers.items() if name.startswith("ce-")
    }
    if content_type:
        given["datacontenttype"] = headers["content-type"]
    if content_type.endswith("json") and body:
        given["data"] = decoder.decode(body.decode("utf-8"))
    elif body:
        given["data_base64"] = b64encode(body).decode("ascii")
    return given
