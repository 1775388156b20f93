"""Check single values of the configuration, and compare names; each error says what was expected."""

from __future__ import annotations

import json
import os
import re
from base64 import b64decode
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from ipaddress import ip_address
from pathlib import Path
from socket import AF_INET, AF_INET6, AddressFamily
from typing import TYPE_CHECKING, Annotated
from urllib.parse import unquote, urlsplit

from pydantic import AliasChoices, Field

from bridge.config.base import Secret, spellings
from bridge.contract.types import MAX_SESSION_CHARACTERS

if TYPE_CHECKING:
    import ssl


def nearest(name: object, known: Iterable[str], *, similarity: float = 0.5) -> str:
    """Return "; did you mean X?" with the known name that is nearest in any letter case.

    It is "" if none is as similar (0 to 1).
    """
    by_lower = {one.lower(): one for one in known}
    close = get_close_matches(str(name).lower(), by_lower, n=1, cutoff=similarity)
    return f"; did you mean {by_lower[close[0]]}?" if close else ""


LIKELY = 0.75  # so similar are a value and the one that its author is likely to mean

_TOKEN = re.compile(r"[!-~]+")

HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9-]+)+(:\d+)?")


def check_policy_value(value: str, known: tuple[str, ...]) -> str:
    """Refuse a likely slip, which in a deny rule would permit; any other value may be a new one of Azure's."""
    if value.lower() not in map(str.lower, known) and (hint := nearest(value, known, similarity=LIKELY)):
        raise ValueError(f"expected one of {', '.join(known)}{hint}")
    return value


def check_some(value: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse an empty list."""
    if not value:
        raise ValueError("expected at least one value")
    return value


def check_template(template: str, names: tuple[str, ...]) -> str:
    """Refuse a template with placeholders other than `names`."""
    unknown = [name for name in re.findall(r"\{([^{}]*)\}", template) if name not in names]
    if unknown or template.count("{") != template.count("}"):
        expected = ", ".join(f"{{{name}}}" for name in names)
        raise ValueError(f"expected only the placeholders {expected}")
    fixed = re.sub(r"\{[^{}]*\}", "", template)
    if len(fixed) >= MAX_SESSION_CHARACTERS:
        raise ValueError(f"expected less than {MAX_SESSION_CHARACTERS} characters beside the placeholders")
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


_HEADER = re.compile(r"([A-Za-z0-9_-]+)\s*:\s*([ -~]*)")


def parse_headers(text: str) -> dict[str, str]:
    """Read headers, one `Name: value` a line; blank lines and lines that begin with # do not count."""
    headers = {}
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if line and not line.startswith("#"):
            found = _HEADER.fullmatch(line)
            if not found:
                raise ValueError(f"headers, line {number}: expected `Name: value` in printable ASCII")
            headers[found[1]] = found[2]
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


_SPELLINGS = AliasChoices(*spellings("signing_secrets"))  # so that an error names it as it is written
SigningSecrets = Annotated[Secret | None, check_signing_secrets, Field(validation_alias=_SPELLINGS)]


_SECRET_IN_URL = re.compile(
    r'(?<=://)[^\s"/@]*(?=@)|(?<=\?)[^\s"]+|(?i:(?<=SharedAccessKey=)|(?<=SharedAccessSignature=))[^;"]+'
)


def quote(value: object) -> str:
    """Write a value into an error, without the secrets that a URL may hold."""
    text = _SECRET_IN_URL.sub("***", json.dumps(value, default=str))
    return text if len(text) <= 80 else text[:77] + "..."  # noqa: PLR2004 - a line's worth


_PLAIN_PATH = re.compile(r"(/[a-z._-]+){2,}|[a-z]{1,12}([._-][a-z]{1,12}){1,3}|[A-Za-z]:\\[^:]+")


def quote_path(path: Path) -> str:
    """Write the name of a file into an error, unless it may be a secret that was pasted in its place.

    A secret neither exists, nor begins with a folder that exists or a drive, nor consists of words after slashes or
    with signs between.
    """
    first = Path(*path.parts[: 1 + bool(path.anchor)])
    is_below = first != path and os.path.isdir(first)  # noqa: PTH112 - it raises nothing
    if is_below or _PLAIN_PATH.fullmatch(str(path)) or os.path.exists(path):  # noqa: PTH110 - as above
        return json.dumps(str(path))
    return "a name that is not shown because it may be a secret"


ROLES = 4  # forward, listen, relay and console


def check_listen(value: str) -> str:
    """Refuse what is no address to listen on; an empty one is none."""
    if value:
        socket_address(value)
    return value


def socket_address(listen: str) -> tuple[AddressFamily, tuple[str, int]]:
    """Return the family, the host and the port of an address to listen on.

    Raises:
        ValueError: it has another form.
    """
    host, _, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or "/" in host or not port.isascii() or not port.isdigit() or int(port) > 65535:  # noqa: PLR2004 - the highest port
        raise ValueError("expected an address and a port, no URL, for example 127.0.0.1:9464 or [::1]:9464")
    return AF_INET6 if ":" in host else AF_INET, (host, int(port))


def addresses(listen: str, last: str) -> list[str]:
    """Return where a process may listen: what is configured and the next ports, or first where it did the last time.

    So all processes of a machine can share one configuration.
    """
    host, _, port = listen.rpartition(":")
    ports = range(int(port), min(int(port) + ROLES, 65536)) if int(port) else [0]
    return sorted((f"{host}:{number}" for number in ports), key=lambda address: address != last)


# What OpenSSL says of a certificate by an authority that is not trusted, and what helps.
UNTRUSTED_MARKS = ("issuer certificate", "signed certificate")
UNTRUSTED = "its authority is not trusted: name its file as ca_file, not as SSL_CERT_FILE"


def check_ca(path: Path) -> None:
    """Refuse a file without CA certificates.

    Raises:
        ValueError: what is wrong with it.
    """
    _check_pem("CA certificates in PEM", [path], lambda tls: tls.load_verify_locations(cafile=path))


def check_certificate(certificate: Path, key: Path | None) -> None:
    """Refuse a client certificate that cannot be used; without `key`, its file must hold the key as well.

    Raises:
        ValueError: what is wrong with it.
    """
    _check_pem(
        "a certificate and its own private key in PEM, without passphrase",
        [certificate, *([key] if key else [])],
        lambda tls: tls.load_cert_chain(certificate, key, password=""),  # OpenSSL would ask for a missing one
    )


def _check_pem(expected: str, files: Sequence[Path], load: Callable[[ssl.SSLContext], object]) -> None:
    import ssl  # noqa: PLC0415 - few configurations name a certificate

    for file in files:
        try:
            file.open("rb").close()
        except OSError as error:
            raise ValueError(f"given {quote_path(file)}: {error.strerror}") from error
    try:
        load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    except OSError as error:
        raise ValueError(f"{' and '.join(map(str, files))}: expected {expected}") from error
