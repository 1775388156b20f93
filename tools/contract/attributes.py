"""The attributes around the data of every type, as models, and the CloudEvents that they make with it."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import Any, Literal

from pydantic import Field, create_model

from bridge.contract.types import schema_id, type_of
from tools.contract.data import DATA, TIME, Part


def _attribute(text: str, **options: Any) -> Any:
    return Field(description=text, **options)


_optional = partial(_attribute, default=None)
_reference = partial(_attribute, min_length=1, json_schema_extra={"format": "uri-reference"})


class Attributes(Part):
    """The attributes that every CloudEvent has."""

    specversion: Literal["1.0"] = _attribute("The version of CloudEvents.")
    id: str = _attribute(
        "The same for the same change on every retry, after every restart, and on every VM that saw the "
        "same; with `source` it identifies the event. Also the message id on Service Bus.",
        min_length=1,
    )
    source: str = _reference(
        "The ARM id of the scale set or resource group for a scheduledevent; for others that of the VM, unchanged "
        "within a reporterepoch."
    )
    type: str = _attribute("The type. Also the subject of the message on Service Bus.")
    subject: str = _attribute("The EventId; the VM's name for events that are not about one.")
    time: datetime = _attribute(f"When this VM saw it. Unit: {TIME}.")
    datacontenttype: Literal["application/json"] = _attribute("The format of the data.")
    dataschema: str = _attribute("The $id of the schema of the data.")


class EventAttributes(Attributes):
    """Those of a change of a scheduled event."""

    correlationid: str = _attribute("The EventId as received: ignore case when comparing.")
    partitionkey: str = _attribute("The EventId as received.")


class OwnAttributes(Attributes):
    """Those of the VM's own events, which are numbered."""

    reporter: str = _attribute("The reporting process: `<vm>/forward`, `<vm>/listen` or `<host>/relay`.")
    reporterepoch: str = _attribute("The unique id of this run of the process, in which reporterseq counts.")
    reporterseq: str = _attribute(
        "A gapless counter that begins with 1, with leading zeros.", pattern="^[0-9]{12,}$"
    )


class ReceiptAttributes(OwnAttributes):
    """Those of a receipt; each of the first two is absent if the command has no EventId, the last without an id."""

    correlationid: str = _optional("The EventId: ignore case when comparing.")
    partitionkey: str = _optional("The EventId.")
    causationid: str = _optional("The id of the command that this answers.")


class CommandAttributes(Attributes):
    """Those of a command: a sender need not give more than CloudEvents requires."""

    id: str = _attribute("The command's id: with it, a repeated command is decided once.", min_length=1)
    source: str = _reference("Who sends it.")
    subject: str = _optional("Any.")
    time: datetime = _optional("When it was written.")
    datacontenttype: Literal["application/json"] = _optional("The format of the data.")
    dataschema: str = _optional("The $id of the schema of the data.")


_FAMILIES: dict[str, type[Attributes]] = {
    "scheduledevent": EventAttributes,
    "approval": ReceiptAttributes,
    "command": CommandAttributes,
    "bridge.test": Attributes,  # it is not numbered
}


def cloudevents() -> list[type[Part]]:
    """Return a model of the whole CloudEvent of each type, in the order of `DATA`."""
    return [_cloudevent(name, data) for name, data in DATA.items()]


def _cloudevent(name: str, data: type[Part]) -> type[Part]:
    base = _FAMILIES.get(name) or _FAMILIES.get(name.partition(".")[0], OwnAttributes)
    constants = {"type": type_of(name), "dataschema": schema_id(name)}
    fields: dict[str, Any] = {
        attribute: (Literal[value], base.model_fields[attribute]) for attribute, value in constants.items()
    }
    title = data.__name__.removesuffix("Data")
    return create_model(title, __base__=base, __doc__=data.__doc__, data=(data, ...), **fields)
