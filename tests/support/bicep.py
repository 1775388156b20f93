"""Read the Bicep files as trees, and evaluate the expressions that tests need."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache, reduce
from math import prod
from typing import Any

from pycep import BicepParser

from tests.support.paths import ROOT

FOLDER = ROOT / "infra" / "bicep"
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.bicep"))
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "concat": lambda *lists: [one for each in lists for one in each],
    "empty": lambda value: not value,
    "json": json.loads,
    "string": json.dumps,
}


@cache
def parser() -> BicepParser:
    return BicepParser(cache=False)


@cache
def tree(file: str) -> dict[str, Any]:
    return dict(parser().parse(text=(FOLDER / file).read_text()))


def body(part: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a resource or module, without its loop or condition."""
    config: dict[str, Any] = part["config"]
    inner: dict[str, Any] = config.get("config", {})
    return inner if {"condition", "loop_type"} & config.keys() else config


def resources(type_: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Return every resource of the type: its file, its symbolic name and its body."""
    return [
        (file, name, body(resource))
        for file in FILES
        for name, resource in tree(file).get("resources", {}).items()
        if resource["type"] == type_ and not resource["existing"]
    ]


def properties(type_: str) -> dict[str, Any]:
    """Return the properties of the only resource of the type."""
    [(_, _, config)] = resources(type_)
    found: dict[str, Any] = config["properties"]
    return found


def evaluate(node: Any, names: Mapping[str, Any]) -> Any:
    """Evaluate an expression of the kinds that the modules have; names and texts look alike in the tree.

    Args:
        node: of the tree.
        names: the variables, parameters and resources, as values or as nodes.
    """
    if isinstance(node, list):
        return [evaluate(one, names) for one in node]
    if isinstance(node, str):
        if node in names:
            return evaluate(names[node], {name: value for name, value in names.items() if name != node})
        return re.sub(r"\$\{([\w.]+)\}", lambda one: str(_look_up(one[1].split("."), names)), node)
    if not isinstance(node, dict):
        return node
    if function := node.get("function"):
        return _FUNCTIONS[function["type"]](*evaluate([*function["parameters"].values()], names))
    if loop := node.get("loop_type"):
        given, item = evaluate(loop["detail"]["array_name"], names), loop["detail"]["item_name"]
        return [evaluate(node["config"], {**names, item: one}) for one in given]
    if isinstance(node.get("operator"), dict):
        return _operate(node, names)
    return {key: evaluate(value, names) for key, value in node.items()}


def _operate(node: dict[str, Any], names: Mapping[str, Any]) -> Any:
    kind, given = node["operator"]["type"], node["operator"]["operands"]
    match kind:
        case "conditional":
            return evaluate(
                given["true_value" if evaluate(given["condition"], names) else "false_value"], names
            )
        case "not":
            return not evaluate(given["bool_value"], names)
        case "and":
            return all(evaluate([*given.values()], names))
        case "multiply":
            return prod(evaluate([*given.values()], names))
        case "property_accessor":
            return _look_up(_path(node), names)
    raise AssertionError(kind)


def _path(node: Any) -> list[str]:
    if isinstance(node, str):
        return [node]
    return [name for one in node["operator"]["operands"].values() for name in _path(one)]


def _look_up(path: list[str], names: Mapping[str, Any]) -> Any:
    return reduce(lambda found, name: found[name], path[1:], evaluate(path[0], names))
