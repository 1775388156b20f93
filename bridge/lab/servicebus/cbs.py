"""Check the tokens that clients send to the node $cbs. No I/O."""

from __future__ import annotations

import base64
import hashlib
import hmac
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote, urlsplit

from bridge.lab.servicebus.sections import Content

ADDRESS = "$cbs"
MANAGEMENT_SUFFIX = "/$management"
_SAS = "SharedAccessSignature "


@dataclass(frozen=True, kw_only=True)
class TokenResult:
    """Hold the answer to a token, and the path of the entity that it gives access to."""

    status_code: int
    description: str
    path: str = ""

    @property
    def accepted(self) -> bool:
        """Return whether the token is valid."""
        return self.status_code < 300  # noqa: PLR2004 - a status of success


def check_token(request: Content, *, key_name: str, key: str, now: float) -> TokenResult:
    """Return the answer to a put-token request.

    Args:
        request: the message.
        key_name: the name of the accepted key.
        key: its value.
        now: the Unix time.
    """
    properties = request.application_properties
    if properties.get("operation") != "put-token":
        return TokenResult(status_code=400, description=f"operation given: {properties.get('operation')!r}")
    token = request.value
    if not isinstance(token, str) or not token:
        return TokenResult(status_code=400, description="token given: none")
    path = _path(str(properties.get("name", "")))
    if not token.startswith(_SAS):
        # The lab has no tenant: it accepts any other token. The fault `unauthorized` simulates a missing role.
        # The request's `type` does not help: azure-servicebus also sends "jwt" for SAS tokens.
        return TokenResult(status_code=202, description="Accepted", path=path)
    return _check_signature(token, path, key_name=key_name, key=key, now=now)


def _check_signature(token: str, path: str, *, key_name: str, key: str, now: float) -> TokenResult:
    fields = {name: values[0] for name, values in parse_qs(token.removeprefix(_SAS)).items()}
    # The signature covers the resource as encoded in the token.
    resource = dict(part.partition("=")[::2] for part in token.removeprefix(_SAS).split("&")).get("sr", "")
    signed = f"{resource}\n{fields.get('se', '')}".encode()
    signature = base64.b64encode(hmac.new(key.encode(), signed, hashlib.sha256).digest()).decode()
    given = fields.get("sig", "").replace(" ", "+")
    if fields.get("skn") != key_name or not hmac.compare_digest(given, signature):
        return TokenResult(
            status_code=401, description="InvalidSignature: The token has an invalid signature."
        )
    if not fields["se"].isdigit() or int(fields["se"]) <= now:
        return TokenResult(status_code=401, description="ExpiredToken: The token is expired.")
    if not opens({_path(unquote(resource))}, path):
        return TokenResult(status_code=401, description="InvalidAudience: The token is for another entity.")
    return TokenResult(status_code=202, description="Accepted", path=path)


def _path(address: str) -> str:
    path = urlsplit(address).path if "//" in address else address
    # npm's client sends a separate token for an entity's management node.
    return path.strip("/").lower().removesuffix(MANAGEMENT_SUFFIX)


def opens(paths: set[str], entity: str) -> bool:
    """Return whether tokens for these paths give access to an entity."""
    return any(not path or f"{entity.lower()}/".startswith(f"{path}/") for path in paths)
