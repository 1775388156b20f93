"""Read the Bicep files as trees, evaluate the expressions that tests need, and say what a deployment makes."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, reduce
from math import prod
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

from pycep import BicepParser

from tests.support.paths import ROOT
from tests.support.snapshots import DATA, LIST, PARAMETERS, lines

FOLDER = ROOT / "infra" / "bicep"
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.bicep"))
DEPLOYMENT = "Microsoft.Resources/deployments"


class Refused(Exception):
    """A template refuses its parameters, with the text that it gives."""


# What Azure says of resources once they are there, as far as the templates have to understand it.
_AZURE: Mapping[str, str] = {
    "bus.properties.serviceBusEndpoint": "https://contoso-maintenance.servicebus.windows.net:443/",
    "identity.properties.clientId": "11111111-1111-1111-1111-111111111111",
    "managedEnvironment.properties.defaultDomain": "a-b-1.westeurope.azurecontainerapps.io",
}


class Symbol:
    """A resource or module: its id or outputs are known, and its other properties once it is deployed."""

    def __init__(self, path: str, **known: Any) -> None:
        self._path, self._known = path, known

    def __getitem__(self, name: str | int) -> Any:
        path = f"{self._path}.{name}"
        return self._known[str(name)] if name in self._known else _AZURE.get(path) or Symbol(path)

    def __str__(self) -> str:
        return f"[{self._path}]"


@dataclass(frozen=True, kw_only=True)
class Deployed:
    """A resource or nested deployment that a deployment makes, and what it is attached to."""

    file: str
    type: str
    name: str
    scope: str = ""
    body: Mapping[str, Any] = field(default_factory=dict)

    @property
    def properties(self) -> Any:
        return self.body["properties"]


def _fail(text: str) -> None:
    raise Refused(text)


def _flat(*lists: list[Any]) -> list[Any]:
    return [one for each in lists for one in each]


def _resource_id(type_: str, *names: str) -> str:
    provider, *kinds = type_.split("/")
    return "/".join([provider, *_flat(*map(list, zip(kinds, names, strict=True)))])


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "any": lambda value: value,
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
    "load_json_content": lambda path: path,
    "map": lambda items, made: [made(one) for one in items],
    "resource_group": lambda: Symbol("resourceGroup()"),
    "resource_id": _resource_id,
    "split": lambda text, by: re.split("|".join(map(re.escape, [by] if isinstance(by, str) else by)), text),
    "string": json.dumps,
    "take": lambda text, count: text[:count],
    "subscription_resource_id": lambda *parts: "/".join(map(str, parts)),
    "tenant": lambda: Symbol("tenant()"),
    "to_lower": lambda text: str(text).lower(),
    "unique_string": lambda *_: "unique",
    "union": lambda *lists: list(dict.fromkeys(_flat(*lists))),
}
_OPERATORS: Mapping[str, Callable[..., Any]] = {
    "not": operator.not_,
    "and": lambda *given: all(given),
    "or": lambda *given: any(given),
    "multiply": lambda *given: prod(given),
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
    """Return a file as pycep reads it, with the parentheses that it needs to see what belongs together."""
    text = re.sub(r"(!empty\(\w+\)) &&", r"(\1) &&", (FOLDER / file).read_text())
    return dict(parser().parse(text=re.sub(r"(\w+ == '\w+') \?", r"(\1) ?", text)))


def _parsed(expression: str) -> Any:
    return parser().parse(text=f"var found = {expression}\n")["variables"]["found"]["value"]


def body(part: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a resource or module, without its loop or condition."""
    config: dict[str, Any] = part["config"]
    inner: dict[str, Any] = config.get("config", {})
    return inner if {"condition", "loop_type"} & config.keys() else config


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
        text = node.replace("\\'", "'")
        return re.sub(r"\$\{([^}]+)\}", lambda one: str(evaluate(_parsed(one[1]), names)), text)
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
    return {key.strip("'"): evaluate(value, names) for key, value in node.items()}


def _operate(node: dict[str, Any], names: Mapping[str, Any]) -> Any:
    kind, given = node["operator"]["type"], node["operator"]["operands"]
    match kind:
        case "conditional":
            holds = evaluate(given["condition"], names)
            return evaluate(given["true_value" if holds else "false_value"], names)
        case "property_accessor" | "index_accessor":
            first, rest = given.values()
            symbol = names.get(f"@{first}") if isinstance(first, str) else None
            return reduce(operator.getitem, _dotted(rest), symbol or evaluate(first, names))
    return _OPERATORS[kind](*evaluate([*given.values()], names))


def _dotted(node: Any) -> list[str | int]:
    """Return the names of `one.of[0].another`."""
    if not isinstance(node, dict):
        return [node]
    return [name for one in node["operator"]["operands"].values() for name in _dotted(one)]


def read_parameters(file: Path) -> tuple[str, dict[str, Any]]:
    """Return the template that a parameters file is for, as a path below `FOLDER`, and the values."""
    using, _, text = file.read_text().partition("\n")
    parsed = parser().parse(text=re.sub(r"(?m)^param ", "var ", text))
    template = relpath(file.parent / using.split("'")[1], FOLDER)
    return template, {name: evaluate(one["value"], {}) for name, one in parsed["variables"].items()}


def deployed(name: str, **changes: Any) -> list[Deployed]:
    """Deploy with a parameter file of tests/data/bicep, and with changes of its values."""
    template, parameters = read_parameters(DATA / f"{name}.bicepparam")
    return deploy(template, {**parameters, **changes})


def of(type_: str, made: Iterable[Deployed]) -> list[Deployed]:
    """Return what a deployment makes of a type."""
    return [one for one in made if one.type == type_]


def deploy(file: str, given: Mapping[str, Any]) -> list[Deployed]:
    """Say what a deployment of a template makes, nested deployments and their resources included.

    Args:
        file: the template, below `FOLDER`.
        given: the parameters; what is only known at run time is a `Symbol`.

    Raises:
        Refused: the template does not take the parameters.
    """
    made: list[Deployed] = []
    _deploy(file, given, made)
    return made


def _deploy(file: str, given: Mapping[str, Any], made: list[Deployed]) -> dict[str, Any]:
    """Add what a template makes; return its outputs."""
    parsed, names = tree(file), _names(file, given)
    for symbol, resource in parsed.get("resources", {}).items():
        for local in () if resource["existing"] else _times(resource["config"], names):
            config = evaluate(body(resource), local)
            made.append(
                Deployed(
                    file=file,
                    type=resource["type"],
                    name=_full_name(file, symbol, local),
                    scope=names[f"@{config['scope']}"]["id"] if "scope" in config else "",
                    body=config,
                )
            )
    for symbol, module in parsed.get("modules", {}).items():
        for local in _times(module["config"], names):
            config = evaluate(body(module), local)
            made.append(Deployed(file=file, type=DEPLOYMENT, name=config["name"], body=config))
            path = normpath(join(dirname(file), module["detail"]["path"]))
            names[f"@{symbol}"] = Symbol(symbol, outputs=_deploy(path, config["params"], made))
    return {name: evaluate(output["value"], names) for name, output in parsed.get("outputs", {}).items()}


def _names(file: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters, variables and symbols of a template."""
    parsed = tree(file)
    parameters = parsed["parameters"]
    needed = {name for name, parameter in parameters.items() if parameter["default"] is None}
    if given.keys() - parameters.keys() or needed - given.keys():
        raise Refused(f"{file}: given {sorted(given)}, expected {sorted(parameters)}")
    for name, value in given.items():
        limits = {one["type"]: one.get("argument") for one in parameters[name]["decorators"]}
        size = len(value) if isinstance(value, (str, list)) else 0
        if size and not limits.get("min_length", 0) <= size <= limits.get("max_length", size):
            raise Refused(f"{name}: given a length of {size}, which its decorators do not allow")
    names = {name: given.get(name, parameter["default"]) for name, parameter in parameters.items()}
    names |= {name: variable["value"] for name, variable in parsed.get("variables", {}).items()}
    for symbol, resource in parsed.get("resources", {}).items():
        if "loop_type" not in resource["config"]:  # the templates refer to none of those
            name = _full_name(file, symbol, names)
            names[f"@{symbol}"] = Symbol(symbol, id=f"{resource['type']}/{name}", name=name)
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


if __name__ == "__main__":
    listed: list[str] = []
    for parameters in PARAMETERS:
        found = [one for one in deployed(parameters.stem) if one.type != DEPLOYMENT]
        listed += lines(parameters.stem, ((one.type, one.name) for one in found))
    LIST.write_text("\n".join(listed) + "\n")
