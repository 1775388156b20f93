"""The mistakes that `make mutants` puts into the code."""

from __future__ import annotations

import ast

import pytest

from tests.mutants.mistakes import mistakes, with_mistake


def wrong(source: str) -> list[str]:
    """Return the module once with each mistake."""
    return [with_mistake(source, mistake.number) for mistake in mistakes(source)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("found = a < b", "found = a <= b"),
        ("found = a and b", "found = a or b"),
        ("count += 1", "pass"),
        ("wait(9)", "wait(10)"),
        ("wait(60)", "wait(120)"),
        ("send(event, synced=flag)", "send(event)"),
        ("if done:\n    stop()", "if not done:\n    stop()"),
        ("commit()\nsettle()", "settle()\ncommit()"),
        ("try:\n    send()\nexcept OSError:\n    retry()", "try:\n    send()\nexcept OSError:\n    raise"),
    ],
)
def test_a_mistake_is_made(source: str, expected: str) -> None:
    assert expected in wrong(source)


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring with 1 number."""',
        'log.info("done %d", 1)',
        "def send(limit: Literal[1]) -> None: ...",
    ],
)
def test_what_no_test_should_notice_is_left_alone(source: str) -> None:
    assert mistakes(source) == []
    assert "send(count)\ncount += 1" not in wrong("count += 1\nsend(count)")  # they depend on each other


def test_every_mistake_is_another_module_that_compiles() -> None:
    source = "def f(a, b=1):\n    if a and not b:\n        return [x for x in a if x > 2]\n    g(a, k=b)"
    variants = wrong(source)
    assert len({*variants}) == len(variants) > 5
    for one in variants:
        ast.parse(one)
        assert one != ast.unparse(ast.parse(source))
