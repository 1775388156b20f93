"""Write CloudEvents 1.0 as JSON (structured mode) and as HTTP headers with a body (binary mode)."""

from __future__ import annotations

import json
from urllib.parse import quote

from bridge.model import CloudEvent, Json, iso_utc

# Kept, because making an encoder costs more than using it.
_encode = json.JSONEncoder(separators=(",", ":")).encode

CONTENT_TYPE = "application/cloudevents+json; charset=utf-8"
BATCH_CONTENT_TYPE = "application/cloudevents-batch+json; charset=utf-8"
# HTTP binding, "Header values": printable ASCII stays but for the quote and the percent sign.
_HEADER_SAFE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')


def structured(event: CloudEvent) -> bytes:
    """Write the whole event as one JSON object.

    ASCII only: what IMDS sent may hold lone surrogates, which only an escape can carry.
    """
    return _encode(
        {
            "specversion": "1.0",
            "id": event.id,
            "source": event.source,
            "type": event.type,
            "subject": event.subject,
            "time": iso_utc(event.time),
            "dataschema": event.dataschema,
            "datacontenttype": "application/json",
            **event.extensions,
            "data": event.data,
        }
    ).encode("ascii")


def binary(envelope: dict[str, Json]) -> tuple[dict[str, str], bytes]:
    """Split a structured event into `ce-` headers and the data as the body."""
    headers = {
        f"ce-{name}": quote(value if isinstance(value, str) else json.dumps(value), safe=_HEADER_SAFE)
        for name, value in envelope.items()
        if name not in ("data", "datacontenttype")
    }
    headers["Content-Type"] = envelope["datacontenttype"]
    return headers, _encode(envelope["data"]).encode("ascii")
