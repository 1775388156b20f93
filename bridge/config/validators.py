"""Check single values of the configuration; each error says what was expected."""

from __future__ import annotations

import json
import os
import re
from base64 import b64decode
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from bridge.config.names import likely_meant

_TOKEN = re.compile(r"[!-~]+")

HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9-]+)*(:\d+)?")


def check_policy_value(value: str, known: tuple[str, ...]) -> str:
    """Refuse a likely slip, which in a deny rule would permit; any other value may be a new one of Azure's."""
    is_known = value.lower() in {one.lower() for one in known}
    if not is_known and (meant := likely_meant(value, known)):
        raise ValueError(f"expected one of {', '.join(known)}; did you mean {meant}?")
    return value


def check_template(template: str, names: tuple[str, ...]) -> str:
    """Refuse a template with placeholders other than `names`."""
    unknown = [name for name in re.findall(r"\{([^{}]*)\}", template) if name not in names]
    if unknown or template.count("{") != template.count("}"):
        expected = ", ".join(f"{{{name}}}" for name in names)
        raise ValueError(f"expected only the placeholders {expected}")
    return template


def check_url(url: str, *, allow_http: bool) -> str:
    """Refuse anything but an http(s) URL, and plain http to other machines."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if host is None or parts.scheme not in ("http", "https") or not _TOKEN.fullmatch(url):
        raise ValueError("expected a URL such as https://host/path")
    if parts.username or parts.password:
        raise ValueError("expected a URL without user and password; use bearer_token or headers")
    if parts.scheme == "http" and not allow_http and not is_loopback(host):
        raise ValueError("expected https; set allow_http = true to send without encryption")
    return url


def check_token(token: str) -> str:
    """Refuse what an Authorization header cannot contain."""
    if not _TOKEN.fullmatch(token):
        raise ValueError("expected a token: one word of ASCII letters, digits and signs")
    return token


def check_proxy(url: str) -> str:
    """Refuse anything but the address of an HTTP proxy, without showing it: it may hold a password."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        # Basic authentication can send nothing else.
        unquote(parts.netloc).encode("latin-1")
    except ValueError:
        usable = False
    if not usable or parts.path.strip("/") or parts.query:
        raise ValueError("expected a proxy such as http://host:3128 or http://user:password@host:3128")
    return url


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


_HEADER_NAME = re.compile(r"[A-Za-z0-9_-]+")
_HEADER_VALUE = re.compile(r"[ -~]*")


def parse_headers(text: str) -> dict[str, str]:
    """Read headers, one `Name: value` a line; blank lines and lines that begin with # do not count."""
    headers = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, colon, value = line.partition(":")
        if (
            not colon
            or not _HEADER_NAME.fullmatch(name.strip())
            or not _HEADER_VALUE.fullmatch(value.strip())
        ):
            raise ValueError(f"headers, line {number}: expected `Name: value` in printable ASCII")
        headers[name.strip()] = value.strip()
    return headers


def check_signing_secrets(text: str) -> list[str]:
    """Read Standard Webhooks secrets, one a line: `whsec_` and base64 of 24 to 64 bytes."""
    secrets = [line.strip() for line in text.splitlines() if line.strip()]
    for secret in secrets:
        try:
            size = len(b64decode(secret.removeprefix("whsec_"), validate=True))
        except ValueError:
            size = 0
        if not 24 <= size <= 64:  # noqa: PLR2004 - Standard Webhooks 1.0.0
            raise ValueError("expected whsec_ and the base64 of 24 to 64 bytes")
    if not secrets:
        raise ValueError("expected at least one")
    return secrets


_SECRET_IN_URL = re.compile(
    r'(?<=://)[^\s"/@]*(?=@)|(?<=\?)[^\s"]+|(?i:(?<=SharedAccessKey=)|(?<=SharedAccessSignature=))[^;"]+'
)


def quote(value: object) -> str:
    """Write a value into an error, without the secrets that a URL may hold."""
    text = _SECRET_IN_URL.sub("***", json.dumps(value, default=str))
    return text if len(text) <= 80 else text[:77] + "..."  # noqa: PLR2004 - a line's worth


def quote_path(path: Path) -> str:
    """Write the name of a file into an error, unless it may be a secret that was pasted in its place.

    A secret is neither a file that exists nor one in a folder that exists.
    """
    is_in_folder = len(path.parts) > 1 + bool(path.anchor) and os.path.isdir(path.parent)  # noqa: PTH112 - it raises nothing
    if is_in_folder or os.path.exists(path):  # noqa: PTH110 - as above
        return json.dumps(str(path))
    return "a name that is not shown because it may be a secret"


def join_signing_secrets(given: Any) -> Any:
    """Take one signing secret or a list of them; a file holds one a line."""
    if not isinstance(given, dict):
        return given
    taken = dict(given)
    for suffix in ("", "_file"):
        if f"signing_secret{suffix}" in taken:
            taken[f"signing_secrets{suffix}"] = taken.pop(f"signing_secret{suffix}")
    if isinstance(taken.get("signing_secrets"), list):
        taken["signing_secrets"] = "\n".join(map(str, taken["signing_secrets"]))
    return taken
