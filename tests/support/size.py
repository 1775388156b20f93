"""Print how much there is to read, and to hold in mind.

Code lines are lines without blanks, comments and docstrings. An attribute is mutable if a method other than
`__init__` and `__post_init__` assigns or deletes `self.x` or an item of it, or calls a method of it that changes a
container; or if any code assigns `other.x`.

`python -m tests.support.size [FOLDER]` measures the package in FOLDER; the default is this checkout's.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import ROOT

APART = ("console", "lab")
# What a document passes from IMDS to a receiver that has it: poll, compare, store, deliver.
KERNEL = (
    *("imds/*.py", "events/*.py", "delivery/*.py", "forward/__init__.py", "forward/forwarder.py"),
    *("outbox/__init__.py", "outbox/outbox.py", "outbox/room.py", "outbox/rows.py", "outbox/sqlite.py"),
    *("outbox/storage.py", "outbox/state_dir.py", "outbox/outbox.sql", "sinks/__init__.py", "sinks/base.py"),
    *("sinks/http.py", "sinks/webhook.py"),
)
PAGES = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "infra/**/*.md", "schemas/**/*.md")
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
INITIAL = ("__init__", "__post_init__")
CHANGES = {
    *("add", "append", "appendleft", "extend", "insert", "put", "setdefault", "update"),
    *("clear", "discard", "pop", "popitem", "popleft", "remove", "subtract"),
}
LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
NO_CODE = {tokenize.COMMENT, tokenize.ENDMARKER, *LAYOUT}


def main() -> None:
    """Print a line for each package of `bridge`, for other kinds of files, for the tests and for the tools."""
    bridge = (Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT) / "bridge"
    sizes: dict[str, list[int]] = defaultdict(list)
    bodies: list[int] = []
    for path in sorted(bridge.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        lines = code_lines(text)
        inside = path.relative_to(bridge).parts
        sizes[inside[0] if len(inside) > 1 else "top"].append(len(lines))
        bodies += (body for body in function_bodies(text, lines) if inside[0] not in APART)
    for package, files in sizes.items():
        show(package, sum(files), len(files))
    rest = [files for package, files in sizes.items() if package not in APART]
    show("without console and lab", sum(map(sum, rest)), sum(map(len, rest)))
    kernel = [path for where in KERNEL for path in sorted(bridge.glob(where))]
    show("kernel, with its SQL", sum(map(lines_of, kernel)), len(kernel))
    show_mutable(bridge, sum(map(sum, rest)))
    median, high = statistics.median(bodies), statistics.quantiles(bodies, n=10)[-1]
    print(f"body of a function: median {median:g}, 90th percentile {high:g} lines")
    show("SQL", sum(map(lines_of, bridge.rglob("*.sql"))), len([*bridge.rglob("*.sql")]))
    for suffix in (".html", ".js", ".css"):
        show(suffix, *raw(bridge, suffix), "raw lines")
    for folder in ("tests", "tools"):
        show(folder, *raw(bridge.parent / folder, ".py"), "raw lines")
    pages = [path for where in PAGES for path in sorted(bridge.parent.glob(where))]
    words = sum(prose_words(path.read_text(encoding="utf-8")) for path in pages)
    show("documentation", words, len(pages), "words outside code blocks")


def show_mutable(bridge: Path, lines: int) -> None:
    """Print how many attributes are mutable, how many that is for 1,000 lines, and the class with the most."""
    own: dict[str, int] = {}
    outside: set[tuple[Path, str]] = set()
    for path in sorted(bridge.rglob("*.py")):
        if path.relative_to(bridge).parts[0] in APART:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        outside |= {(path, ast.unparse(one)) for one in changed(tree, calls=False) if not is_own(one)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                methods = [one for one in node.body if isinstance(one, FUNCTIONS) and one.name not in INITIAL]
                own[node.name] = len(
                    {one.attr for method in methods for one in changed(method) if is_own(one)}
                )
    most = max(own, key=lambda name: own[name])
    count = sum(own.values())
    share = f"{1000 * count / lines:.1f} for 1,000 lines, at most {own[most]} ({most})"
    print(f"mutable attributes: {count} of self, {share}; {len(outside)} assigned from outside")


def is_own(target: ast.Attribute) -> bool:
    """Return whether it is an attribute of `self` itself."""
    return isinstance(target.value, ast.Name) and target.value.id == "self"


def changed(tree: ast.AST, *, calls: bool = True) -> Iterator[ast.Attribute]:
    """Yield the attributes that are assigned, deleted, or with `calls` changed by a method of a container."""
    for part in ast.walk(tree):
        match part:
            case ast.Assign(targets=given) | ast.Delete(targets=given):
                found = [one for each in given for one in getattr(each, "elts", [each])]
            case ast.AugAssign(target=one) | ast.AnnAssign(target=one) | ast.NamedExpr(target=one):
                found = [one]
            case ast.Call(func=ast.Attribute(value=one, attr=name)) if calls and name in CHANGES:
                found = [one]
            case _:
                found = []
        for one in found:
            target = one
            while isinstance(target, ast.Subscript | ast.Starred):
                target = target.value
            if isinstance(target, ast.Attribute):
                yield target


def show(what: str, lines: int, files: int, kind: str = "code lines") -> None:
    """Print one line."""
    print(f"{what:<24} {lines:>6,} {kind}, {files} file(s)")


def raw(folder: Path, suffix: str) -> tuple[int, int]:
    """Return the number of all lines in the files with that suffix, and of the files."""
    files = [path.read_text(encoding="utf-8") for path in folder.rglob(f"*{suffix}")]
    return sum(len(text.splitlines()) for text in files), len(files)


def prose_words(text: str) -> int:
    """Return the number of words of a page in Markdown, those with a letter or a digit, without its code blocks."""
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return len(re.findall(r"\S*\w\S*", prose))


def lines_of(path: Path) -> int:
    """Count the code lines of a Python file, or the lines of one of SQL without blanks and comments."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return len(code_lines(text))
    return sum(1 for line in text.splitlines() if line.strip() and not line.lstrip().startswith("--"))


def code_lines(text: str) -> set[int]:
    """Return the numbers of the lines that are code."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):  # a docstring
                found.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def function_bodies(text: str, lines: set[int]) -> Iterator[int]:
    """Yield the number of code lines in the body of each function."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, FUNCTIONS):
            yield len(lines & set(range(node.body[0].lineno, (node.end_lineno or 0) + 1)))


if __name__ == "__main__":
    main()
