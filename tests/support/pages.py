"""The pages that people read, and the examples in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.paths import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "schemas/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *(page for name in ("infra", "tools") for page in sorted((ROOT / name).rglob("*.md"))),
]
CLOUD_INIT = ROOT / "infra" / "systemd" / "cloud-init.yaml"
# What a page shows in the place of a secret's file.
SECRETS = {
    "appriseurl": "mailtos://user:password@example.org?to=ops@example.org",
    "url": "https://example.org/hook",
    "headers": "X-Team: ops",
    "proxy": "http://proxy.contoso.com:3128",
    "signing_secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
    "routing_key": "0123456789abcdef0123456789abcdef",
    "connection_string": "Endpoint=sb://a.servicebus.windows.net/;SharedAccessKeyName=b;SharedAccessKey=c",
    "template": '{"text": "{{ notice.title }}"}',
}


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of a page; `name` is its place."""

    name: str
    language: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    found = re.finditer(r"^ *```(.*)\n((?s:.*?))^ *```$", page.read_text(encoding="utf-8"), re.MULTILINE)
    for number, match in enumerate(found, 1):
        name = f"{page.relative_to(ROOT)}-{number}"
        yield Block(name=name, language=match[1], text=match[2])


def section(page: str, title: str) -> str:
    """Return what is below a heading of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"(?ms)^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"))


def configurations() -> dict[str, str]:
    """Return the text of every configuration that the repository shows, by its place."""
    found = {
        str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "infra").rglob("*.toml"))
    }
    for block in (block for page in PAGES for block in blocks(page) if block.language == "toml"):
        # A block with the files of two processes names each in a comment.
        parts = re.split(r"^(?=# imds-bridge (?:forward|listen))", block.text, flags=re.MULTILINE)
        found |= {f"{block.name}-{number}": part for number, part in enumerate(parts) if part.strip()}
    for written in yaml.safe_load(CLOUD_INIT.read_text())["write_files"]:
        if written["path"].endswith(".toml"):
            found[f"cloud-init-{written['path']}"] = written["content"]
    return found


def with_secrets(given: Any, folder: Path) -> Any:
    """Return a configuration whose secret files exist, in `folder`."""
    if isinstance(given, list):
        return [with_secrets(one, folder) for one in given]
    if not isinstance(given, dict):
        return given
    return {
        key: _write_secret(given.get("kind", "") + key.removesuffix("_file"), folder)
        if key.endswith("_file")
        else with_secrets(one, folder)
        for key, one in given.items()
    }


def _write_secret(name: str, folder: Path) -> str:
    file = folder / name
    known = (text for key, text in SECRETS.items() if name.endswith(key))
    file.write_text(next(known, "a-token-of-24-characters"))
    return str(file)


def commands(page: Path) -> Iterator[str]:
    """Yield every call of `imds-bridge` on a page, in shell examples and in the text."""
    for block in blocks(page):
        if block.language in ("sh", "console", "powershell"):
            yield from filter(None, map(_call, shell_lines(block)))
    for span in re.findall(r"`([^`]+)`", prose(page)):
        yield from filter(None, [_call(span)])


def shell_lines(block: Block) -> list[str]:
    """Return what a reader types: of a terminal's transcript only what follows the prompt."""
    text = block.text.replace("\\\n", " ")
    lines = text.splitlines()
    return [line[2:] for line in lines if line.startswith("$ ")] if block.language == "console" else lines


def _call(line: str) -> str:
    """Return the part of a line that calls `imds-bridge`, "" if none does."""
    before = r"(?:.*(?: -- | && |; |exec imds-bridge )|sudo |(?:\w+=\S+ )+)?(?:\S*/|& '.*\\)?"
    found = re.match(rf"{before}imds-bridge(?:\.exe')? ([^;|&>]+)", line.strip())
    return shlex.join(shlex.split(found[1].replace("\\", "/"), comments=True)) if found else ""
