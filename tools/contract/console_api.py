"""Write the OpenAPI document of the console's API from its models: `python -m tools.contract.console_api`."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from bridge.console.api import BASE, MAX_PAGE, MODELS, Error, EventDetails, EventList, VmList
from bridge.console.expected import ExpectedVm
from bridge.console.forget import ORDER, PutAway
from bridge.console.history import PERIODS, History
from bridge.console.rows import MAX_CHARACTERS, MAX_VALUES, OF_PLACE, Filter
from bridge.console.state import DUES

FILE = Path(__file__).resolve().parents[2] / "bridge/console/openapi.json"
Schema = dict[str, Any]

_REF = "#/components/schemas/{model}"
_TEXT: Schema = {"type": "string", "maxLength": MAX_CHARACTERS}
_ERRORS = {
    "400": "A parameter is not valid",
    "401": "Not signed in",
    "403": "Not allowed",
    "421": "The Host header names another machine",
    "422": "A parameter has a value that cannot exist",
    "503": "The store cannot be read, or there are too many requests",
}
_OF_BODY = {
    "400": "It is not such a body",
    "408": "The body did not arrive in time",
    "413": "The body is too large",
}
_EVENT_ID = "602d9444-d2cd-49c7-8624-8643e7171297"


def document() -> str:
    """Return the text of the document."""
    inputs: list[Any] = [(model, "serialization", adapter) for model, adapter in MODELS.items()]
    inputs += [(ExpectedVm, "validation", TypeAdapter(list[ExpectedVm])), (PutAway, "validation", ORDER)]
    _, generated = TypeAdapter.json_schemas(inputs, ref_template=_REF)
    filters = {one.name: _schema(one.default, one.metadata["example"]) for one in fields(Filter)}
    filters["due"]["enum"] = [*DUES, "ended"]
    of_vms = {name: filters[name] for name in ("status", *OF_PLACE)}
    period = {"days": {"type": "integer", "enum": [*PERIODS], "default": PERIODS[0]}, **filters}
    page = {"page": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": 1}}
    after = {
        "after": {
            **_TEXT,
            "description": "Instead of `page`, and blank for the first: each row once, in any order.",
        }
    }
    by_number = {"after": {**after["after"], "pattern": "^[0-9]{0,18}$"}}
    event = _path("One event and its story", EventDetails, {**page, **by_number})
    event["get"]["parameters"].insert(
        0,
        {
            "name": "event_id",
            "in": "path",
            "required": True,
            "schema": {"type": "string", "examples": [_EVENT_ID]},
        },
    )
    event["get"]["responses"]["404"] = _response("Not known", Error)
    vm: Schema = {"$ref": _REF.format(model=ExpectedVm.__name__)}
    listed: Schema = {"type": "array", "items": vm}
    put_away: Schema = {"$ref": _REF.format(model=PutAway.__name__)}
    whole = {
        "openapi": "3.1.0",
        "info": {"title": "imds-bridge console", "version": "1"},
        "paths": {
            f"{BASE}/events": _path("Open events, filtered", EventList, {**filters, **page, **after}),
            f"{BASE}/events/{{event_id}}": event,
            f"{BASE}/vms": _path("VMs, filtered", VmList, {**of_vms, **page, **after}),
            f"{BASE}/expected": {"put": _order("Replace the list of expected VMs", listed)},
            f"{BASE}/forget": {
                "post": _order("Put away an event, or VMs that are silent or stopped", put_away)
            },
            f"{BASE}/history": _path("Figures of the last days, filtered", History, period),
        },
        "components": {"schemas": generated["$defs"]},
    }
    return json.dumps(whole, indent=2) + "\n"


def _schema(default: object, example: str) -> Schema:
    one: Schema = {**_TEXT, "examples": [example]}
    return {"type": "array", "maxItems": MAX_VALUES, "items": one} if isinstance(default, tuple) else one


def _order(summary: str, schema: Schema) -> Schema:
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            "204": {"description": "It is done"},
            "404": _response("There is nothing of that kind", Error),
            **{code: _response(text, Error) for code, text in (_ERRORS | _OF_BODY).items()},
        },
    }


def _path(summary: str, model: type, parameters: Schema) -> Schema:
    in_query = [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in parameters.items()
    ]
    responses = {
        "200": _response(summary, model),
        **{code: _response(text, Error) for code, text in _ERRORS.items()},
    }
    return {"get": {"summary": summary, "parameters": in_query, "responses": responses}}


def _response(description: str, model: type) -> Schema:
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"description": description, "content": {"application/json": {"schema": schema}}}


if __name__ == "__main__":
    FILE.write_text(document(), encoding="utf-8", newline="\n")
