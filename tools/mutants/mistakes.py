"""The mistakes: each is one small change of a module's syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

Change = tuple[ast.AST, str, Callable[[], object]]
"""Where it is, how it reads afterwards, and a function that makes it."""

FLIPPED: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Lt: ast.LtE(),
    ast.LtE: ast.Lt(),
    ast.Gt: ast.GtE(),
    ast.GtE: ast.Gt(),
    ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(),
    ast.In: ast.NotIn(),
    ast.NotIn: ast.In(),
    ast.Is: ast.IsNot(),
    ast.IsNot: ast.Is(),
}
OTHER_WAY: dict[type[ast.operator], ast.operator] = {
    ast.Add: ast.Sub(),
    ast.Sub: ast.Add(),
    ast.Mult: ast.FloorDiv(),
    ast.Div: ast.Mult(),
    ast.FloorDiv: ast.Mult(),
}
TEXTS = (ast.JoinedStr, ast.List, ast.Tuple, ast.Dict, ast.Set)
NOT_RUN = {"annotation", "returns", "decorator_list", "bases"}
SMALL = 10  # numbers below are off by one, others doubled
SHOWN_LENGTH = 100


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One mistake in a module: its number there, its first and last line, and the code before and after."""

    number: int
    first_line: int
    last_line: int
    text: str


def mistakes(source: str) -> list[Mistake]:
    """Return every mistake that can be made in a module."""
    found = []
    for number, (node, after, _) in enumerate(_changes(ast.parse(source))):
        first, last = getattr(node, "lineno", 1), getattr(node, "end_lineno", 1)
        text = f"{_shown(ast.unparse(node))}  ->  {_shown(after)}"
        found.append(Mistake(number=number, first_line=first, last_line=last, text=text))
    return found


def with_mistake(source: str, number: int) -> str:
    """Return the module with one mistake in it."""
    tree = ast.parse(source)
    for at, (_, _, make) in enumerate(_changes(tree)):
        if at == number:
            make()
            return ast.unparse(ast.fix_missing_locations(tree))
    raise IndexError(number)


def _shown(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_LENGTH else f"{line[:SHOWN_LENGTH]}..."


def _changes(tree: ast.AST) -> Iterator[Change]:
    for node in _nodes(tree):
        yield from _of_expression(node)
        yield from _of_condition(node)
        for field, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield from _of_block(node, field, value)


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Walk what runs and matters: no annotations, messages, log lines, protocols and representations."""
    yield node
    for field, value in ast.iter_fields(node):
        if field in NOT_RUN:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_left_alone(child):
                yield from _nodes(child)


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.JoinedStr() | ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()):
            return True
        case ast.ClassDef(bases=[*_, ast.Name(id="Protocol")]) | ast.FunctionDef(name="__repr__"):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.Assign(targets=[ast.Name(id="__all__")]):
            return True
    return _is_log_line(node)


def _is_log_line(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return name in ("log", "logger")
    return False


def _of_expression(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in FLIPPED:
            yield _set(node, "ops", [FLIPPED[type(op)]])
        case ast.BoolOp(op=op):
            yield _set(node, "op", ast.And() if isinstance(op, ast.Or) else ast.Or())
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OTHER_WAY:
            if not any(_is_text(side) for side in (left, right)):
                yield _set(node, "op", OTHER_WAY[type(op)])
        case ast.Constant(value=bool(value)):
            yield _set(node, "value", not value)
        case ast.Constant(value=int(value) | float(value)):
            yield _set(node, "value", value + 1 if abs(value) < SMALL else value * 2)
        case ast.Call(keywords=[*others, ast.keyword(arg=str(name))]):
            yield node, f"without {name}=", partial(setattr, node, "keywords", others)


def _of_condition(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            if not isinstance(test, ast.Compare | ast.Constant):
                yield test, ast.unparse(_negated(test)), partial(setattr, node, "test", _negated(test))
        case ast.comprehension(ifs=[test]):
            yield test, ast.unparse(_negated(test)), partial(setattr, node, "ifs", [_negated(test)])


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, TEXTS) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _negated(test: ast.expr) -> ast.expr:
    return test.operand if isinstance(test, ast.UnaryOp) else ast.UnaryOp(op=ast.Not(), operand=test)


def _set(node: ast.AST, field: str, value: object) -> Change:
    """Return the change that sets a field of the node."""
    old = getattr(node, field)
    setattr(node, field, value)
    after = ast.unparse(node)
    setattr(node, field, old)
    return node, after, partial(setattr, node, field, value)


def _of_block(holder: ast.AST, field: str, block: list[ast.stmt]) -> Iterator[Change]:
    if isinstance(holder, ast.ExceptHandler) and not isinstance(block[-1], ast.Raise):
        yield holder, "the handler raises again", partial(setattr, holder, field, [ast.Raise()])
    for at, statement in enumerate(block):
        if _has_effect(statement):
            yield statement, "(nothing)", partial(block.__setitem__, at, ast.Pass())
        if at and _can_swap(block[at - 1], statement):
            swapped = [statement, block[at - 1]]
            after = f"after the swap with: {ast.unparse(block[at - 1])}"
            yield statement, after, partial(block.__setitem__, slice(at - 1, at + 1), swapped)


def _has_effect(statement: ast.stmt) -> bool:
    """Return whether the code without the statement still could run."""
    match statement:
        case ast.Expr(value=ast.Call()):
            return not _is_log_line(statement)
        case ast.Assign(targets=[target]) | ast.AnnAssign(target=target, value=ast.expr()):
            return isinstance(target, ast.Attribute | ast.Subscript)
    return isinstance(statement, ast.AugAssign | ast.Raise | ast.Delete | ast.Continue | ast.Break)


def _can_swap(first: ast.stmt, second: ast.stmt) -> bool:
    """Return whether two statements that follow each other have effects and no name that ties their order."""
    if not (_has_effect(first) and isinstance(second, ast.Expr | ast.Assign | ast.AugAssign)):
        return False
    if _is_log_line(second) or not isinstance(first, ast.Expr | ast.Assign | ast.AugAssign):
        return False
    return not _names(first, ast.Store) & _names(second, ast.Load)


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, context)}
