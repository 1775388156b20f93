"""What bridge/http/client.py overrides in the libraries below it still exists, and nothing else is private."""

from __future__ import annotations

import ast
import inspect
from http import client as http_client
from pathlib import Path

import pytest
from urllib3.connection import HTTPConnection, HTTPSConnection

import bridge
from bridge.http import client

PACKAGE = Path(bridge.__file__).parent


@pytest.mark.parametrize(
    ("library_class", "name", "parameters"),
    [
        (http_client.HTTPConnection, "_tunnel", ["self"]),
        (http_client.HTTPResponse, "begin", ["self"]),
    ],
)
def test_each_overridden_method_exists_in_the_library(
    library_class: type[object], name: str, parameters: list[str]
) -> None:
    assert list(inspect.signature(getattr(library_class, name)).parameters) == parameters


def test_the_connections_are_those_of_the_library() -> None:
    assert issubclass(client._Connection, HTTPConnection)
    assert issubclass(client._TlsConnection, HTTPSConnection)
    assert http_client.HTTPConnection.response_class is http_client.HTTPResponse


def test_only_one_module_overrides_private_methods_of_connections() -> None:
    found = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute | ast.FunctionDef):
                name = node.attr if isinstance(node, ast.Attribute) else node.name
                if name == "_tunnel":
                    found.add(file.relative_to(PACKAGE).as_posix())
    assert found == {"http/client.py"}
