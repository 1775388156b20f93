"""The AsyncAPI document in `schemas/`: `asyncapi.yaml` beside this file, with a message for each type of event."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from bridge.contract.schemas import CLOUDEVENT, file_name
from bridge.contract.types import type_of
from tools.contract.attributes import ReceiptAttributes, cloudevents
from tools.contract.data import DATA

_WRITTEN_BY_HAND = Path(__file__).with_name("asyncapi.yaml")
_HEADER = "# Written by `python -m tools.contract.generate`, partly from tools/contract/asyncapi.yaml.\n"
_WIDTH = 120
_LONG = 80  # of a text that is written as a block

Part = dict[str, Any]


def document() -> Part:
    """Return the document; a channel that names no messages carries every event."""
    whole: Part = yaml.safe_load(_WRITTEN_BY_HAND.read_text(encoding="utf-8"))
    messages = dict(_messages())
    for channel in whole["channels"].values():
        channel.setdefault("messages", {name: _reference(f"messages/{name}") for name in messages})
    whole["components"]["messages"] = {**messages, **whole["components"]["messages"]}
    return whole


def text() -> str:
    """Return the text of the file."""
    layout = {"sort_keys": False, "allow_unicode": True, "width": _WIDTH, "default_flow_style": None}
    return f"{_HEADER}{yaml.dump(document(), Dumper=_Dumper, **layout)}"


def _messages() -> Iterator[tuple[str, Part]]:
    """Yield the message of each event by its name in the document; those of the command are written by hand."""
    for (name, data), event in zip(DATA.items(), cloudevents(), strict=True):
        if name.startswith("command."):
            continue
        title = event.__name__
        traits = ["event"]
        if issubclass(event, ReceiptAttributes):  # of what `listen` alone publishes
            traits.append("signed")
        yield (
            title[0].lower() + title[1:],
            {
                "name": type_of(name),
                "title": data.title,
                "traits": [_reference(f"messageTraits/{trait}") for trait in traits],
                "payload": {"$ref": f"./{file_name(CLOUDEVENT)}#/definitions/{title}"},
            },
        )


def _reference(component: str) -> Part:
    return {"$ref": f"#/components/{component}"}


class _Dumper(yaml.SafeDumper):  # type: ignore[misc] # the library has no types
    """Writes long texts as blocks."""

    def represent_text(self, text: str) -> Any:
        style = "|" if "\n" in text else ">" if len(text) > _LONG else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)
