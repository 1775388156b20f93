"""Check the tokens that clients put on the node $cbs. Pure."""

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
class Verdict:
    """Hold the answer to a token, and the path of the entity that it opens."""

    status_code: int
    description: str
    path: str = ""

    @property
    def accepted(self) -> bool:
        """Return whether the token is good."""
        return self.status_code < 300  # noqa: PLR2004 - a status of success


def judge(request: Content, *, key_name: str, key: str, now: float) -> Verdict:
    """Return what becomes of a put-token request."""
    properties = request.application_properties
    if properties.get("operation") != "put-token":
        return Verdict(status_code=400, description=f"operation given: {properties.get('operation')!r}")
    token = request.value
    if not isinstance(token, str) or not token:
        return Verdict(status_code=400, description="token given: none")
    path = _path(str(properties.get("name", "")))
    if not token.startswith(_SAS):
        # The lab has no tenant to ask: any other token does. A missing role is the fault `unauthorized`.
        # The request's own `type` tells nothing: azure-servicebus calls signatures jwt, too.
        return Verdict(status_code=202, description="Accepted", path=path)
    return _judge_sas(token, path, key_name=key_name, key=key, now=now)


def _judge_sas(token: str, path: str, *, key_name: str, key: str, now: float) -> Verdict:
    fields = {name: values[0] for name, values in parse_qs(token.removeprefix(_SAS)).items()}
    # The signature is over the resource as it stands in the token, still encoded.
    resource = dict(part.partition("=")[::2] for part in token.removeprefix(_SAS).split("&")).get("sr", "")
    signed = f"{resource}\n{fields.get('se', '')}".encode()
    signature = base64.b64encode(hmac.new(key.encode(), signed, hashlib.sha256).digest()).decode()
    given = fields.get("sig", "").replace(" ", "+")
    if fields.get("skn") != key_name or not hmac.compare_digest(given, signature):
        return Verdict(status_code=401, description="InvalidSignature: The token has an invalid signature.")
    if not fields["se"].isdigit() or int(fields["se"]) <= now:
        return Verdict(status_code=401, description="ExpiredToken: The token is expired.")
    if not opens({_path(unquote(resource))}, path):
        return Verdict(status_code=401, description="InvalidAudience: The token is for another entity.")
    return Verdict(status_code=202, description="Accepted", path=path)


def _path(address: str) -> str:
    path = urlsplit(address).path if "//" in address else address
    # npm's client asks for a token of its own for an entity's management node.
    return path.strip("/").lower().removesuffix(MANAGEMENT_SUFFIX)


def opens(paths: set[str], entity: str) -> bool:
    """Return whether tokens for these paths open an entity."""
    return any(not path or f"{entity.lower()}/".startswith(f"{path}/") for path in paths)
