"""Read the Bicep files as trees, evaluate the expressions that tests need, and say what a deployment makes."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from math import prod
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

from pycep import BicepParser

from tests.support.only import only
from tests.support.paths import ROOT
from tests.support.snapshots import LIST, PARAMETERS, lines

FOLDER = ROOT / "infra" / "bicep"
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.bicep"))
DEPLOYMENT = "Microsoft.Resources/deployments"


class Refused(Exception):
    """A template refuses its parameters, with the text that it gives."""


class Symbol:
    """A resource or module: its id is known, and its other properties once it is deployed."""

    def __init__(self, path: str, **known: str) -> None:
        self._path, self._known = path, known

    def __getitem__(self, name: str) -> str | Symbol:
        return self._known.get(name) or Symbol(f"{self._path}.{name}")

    def __mul__(self, _: int) -> Symbol:
        return self

    __rmul__ = __mul__

    def __str__(self) -> str:
        return f"[{self._path}]"


@dataclass(frozen=True, kw_only=True)
class Deployed:
    """A resource or nested deployment that a deployment makes, with what it is attached to."""

    type: str
    name: str
    scope: str = ""


def _fail(text: str) -> None:
    raise Refused(text)


def _flat(*lists: list[Any]) -> list[Any]:
    return [one for each in lists for one in each]


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "concat": _flat,
    "empty": operator.not_,
    "environment": lambda: Symbol("environment()"),
    "ends_with": lambda text, end: text.lower().endswith(end.lower()),
    "fail": _fail,
    "filter": lambda items, holds: [one for one in items if holds(one)],
    "flatten": lambda lists: _flat(*lists),
    "guid": lambda *parts: f"guid({', '.join(map(str, parts))})",
    "join": lambda parts, between: between.join(parts),
    "json": json.loads,
    "length": len,
    "map": lambda items, made: [made(one) for one in items],
    "resource_group": lambda: Symbol("resourceGroup()"),
    "split": lambda text, by: re.split("|".join(map(re.escape, by)), text),
    "string": json.dumps,
    "subscription_resource_id": lambda *parts: "/".join(parts),
    "tenant": lambda: Symbol("tenant()"),
    "to_lower": lambda text: str(text).lower(),
    "unique_string": lambda *_: "unique",
    "union": lambda *lists: list(dict.fromkeys(_flat(*lists))),
}
_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "equals": operator.eq,
    "not_equals": operator.ne,
    "greater_than": operator.gt,
    "less_than": operator.lt,
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
    _, _, config = only(resources(type_))
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
        return re.sub(r"\$\{([^}]+)\}", lambda one: str(_interpolated(one[1], names)), node)
    if not isinstance(node, dict):
        return node
    if function := node.get("function"):
        given = [one for one in function.get("parameters", {}).values() if one is not None]
        return _FUNCTIONS[function["type"]](*evaluate(given, names))
    if node.get("type") == "lambda_expression":
        made = node["detail"]
        return lambda value: evaluate(made["expression"], {**names, made["var_1"]: value})
    if loop := node.get("loop_type"):
        given, item = evaluate(loop["detail"]["array_name"], names), loop["detail"]["item_name"]
        return [evaluate(node["config"], {**names, item: one}) for one in given]
    if isinstance(node.get("operator"), dict):
        return _operate(node, names)
    return {key: evaluate(value, names) for key, value in node.items()}


def _interpolated(expression: str, names: Mapping[str, Any]) -> Any:
    if re.fullmatch(r"[\w.]+", expression):
        return _look_up(expression.split("."), names)
    parsed = parser().parse(text=f"var found = {expression}\n")
    return evaluate(parsed["variables"]["found"]["value"], names)


def _operate(node: dict[str, Any], names: Mapping[str, Any]) -> Any:
    kind, given = node["operator"]["type"], node["operator"]["operands"]
    match kind:
        case "conditional":
            return evaluate(
                given["true_value" if evaluate(given["condition"], names) else "false_value"], names
            )
        case "not":
            inner = given["bool_value"]
            if isinstance(inner, dict) and inner.get("operator", {}).get("type") in ("and", "or"):
                # pycep reads !a && b as !(a && b), which the templates do not have.
                first, second = inner["operator"]["operands"].values()
                negated = {"operator": {"type": "not", "operands": {"bool_value": first}}}
                joined = {"type": inner["operator"]["type"], "operands": {"1": negated, "2": second}}
                return _operate({"operator": joined}, names)
            return not evaluate(inner, names)
        case "and":
            return all(evaluate([*given.values()], names))
        case "multiply":
            return prod(evaluate([*given.values()], names))
        case "or":
            return any(evaluate([*given.values()], names))
        case "property_accessor":
            if isinstance(given["operand_1"], dict) and "function" in given["operand_1"]:
                found = evaluate(given["operand_1"], names)
                return reduce(operator.getitem, dotted(given["operand_2"]), found)
            return _look_up(dotted(node), names)
    return _OPERATORS[kind](*evaluate([*given.values()], names))


def dotted(node: Any) -> list[str]:
    """Return the names of `one.of.another`."""
    if isinstance(node, str):
        return [node]
    return [name for one in node["operator"]["operands"].values() for name in dotted(one)]


def _look_up(path: list[str], names: Mapping[str, Any]) -> Any:
    symbol = names.get(f"@{path[0]}")
    return reduce(lambda found, name: found[name], path[1:], symbol or evaluate(path[0], names))


def read_parameters(file: Path) -> tuple[str, dict[str, Any]]:
    """Return the template that a parameters file is for, as a path below `FOLDER`, and the values."""
    using, _, text = file.read_text().partition("\n")
    parsed = parser().parse(text=re.sub(r"(?m)^param ", "var ", text))
    template = relpath(file.parent / using.split("'")[1], FOLDER)
    return template, {name: evaluate(one["value"], {}) for name, one in parsed["variables"].items()}


def deploy(file: str, given: Mapping[str, Any]) -> Iterator[Deployed]:
    """Say what a deployment of a template makes, nested deployments and their resources included.

    Args:
        file: the template, below `FOLDER`.
        given: the parameters; what is only known at run time is a `Symbol`.

    Raises:
        Refused: the template does not take the parameters.
    """
    parsed, names = tree(file), _names(file, given)
    for symbol, resource in parsed.get("resources", {}).items():
        for local in () if resource["existing"] else _times(resource["config"], names):
            scope = body(resource).get("scope")
            yield Deployed(
                type=resource["type"],
                name=_full_name(file, symbol, local),
                scope=names[f"@{scope}"]["id"] if scope else "",
            )
    for module in parsed.get("modules", {}).values():
        for local in _times(module["config"], names):
            config = body(module)
            yield Deployed(type=DEPLOYMENT, name=evaluate(config["name"], local))
            path = normpath(join(dirname(file), module["detail"]["path"]))
            yield from deploy(path, evaluate(config["params"], local))


def _names(file: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters, variables and symbols of a template."""
    parsed = tree(file)
    parameters = parsed["parameters"]
    needed = {name for name, parameter in parameters.items() if parameter["default"] is None}
    if given.keys() - parameters.keys() or needed - given.keys():
        raise Refused(f"{file}: given {sorted(given)}, expected {sorted(parameters)}")
    for name, value in given.items():
        _check(name, value, {one["type"]: one.get("argument") for one in parameters[name]["decorators"]})
    names = {name: given.get(name, parameter["default"]) for name, parameter in parameters.items()}
    names |= {name: variable["value"] for name, variable in parsed.get("variables", {}).items()}
    for symbol, resource in parsed.get("resources", {}).items():
        if "loop_type" not in resource["config"]:  # the templates refer to none of those
            id_ = f"{resource['type']}/{_full_name(file, symbol, names)}"
            names[f"@{symbol}"] = Symbol(symbol, id=id_)
    return names | {f"@{symbol}": Symbol(symbol) for symbol in parsed.get("modules", {})}


def _full_name(file: str, symbol: str, names: Mapping[str, Any]) -> str:
    """Return the name of a resource, behind those of its parents."""
    config = body(tree(file)["resources"][symbol])
    parent = f"{_full_name(file, config['parent'], names)}/" if "parent" in config else ""
    return f"{parent}{evaluate(config['name'], names)}"


def _times(config: dict[str, Any], names: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the names for each time that a resource or module is made."""
    if not evaluate(config.get("condition") or True, names):
        return []
    if not (loop := config.get("loop_type")):
        return [names]
    detail = loop["detail"]
    return [{**names, detail["item_name"]: one} for one in evaluate(detail["array_name"], names)]


def _check(name: str, value: Any, limits: Mapping[str, Any]) -> None:
    """Refuse a parameter that is too short or too long."""
    if isinstance(value, (str, list)) and not (
        limits.get("min_length", 0) <= len(value) <= limits.get("max_length", len(value))
    ):
        raise Refused(f"{name}: given a length of {len(value)}, which its decorators do not allow")


if __name__ == "__main__":
    listed = [
        line
        for file in PARAMETERS
        for line in lines(
            file.stem,
            ((one.type, one.name) for one in deploy(*read_parameters(file)) if one.type != DEPLOYMENT),
        )
    ]
    LIST.write_text("\n".join(listed) + "\n")
