"""What tests of TLS and proxies share: a certificate authority of their own, servers' contexts, a proxy."""

from __future__ import annotations

import select
import socket
import ssl
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.support.process import RawServer, Serve

PASSPHRASE = b"secret-passphrase"
ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The files of a certificate and of its key."""

    certificate: Path
    key: Path

    def in_one_file(self) -> Path:
        """Write both into one file."""
        both = self.certificate.with_suffix(".both.pem")
        both.write_bytes(self.certificate.read_bytes() + self.key.read_bytes())
        return both


class Authority:
    """A certificate authority whose files are in `folder`; `file` is its own certificate."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(f"test {name}")
        self.file = folder / f"{name}.pem"
        usage = dict.fromkeys(_USAGES, False) | {"key_cert_sign": True, "crl_sign": True}
        builder = (
            _builder(self._name, self._key.public_key(), timedelta(days=1))
            .issuer_name(self._name)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(x509.KeyUsage(**usage), critical=True)
            .add_extension(_identifier(self._key), critical=False)
        )
        self.file.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))

    def issue(
        self, name: str, *, host: str = "127.0.0.1", days: float = 1, passphrase: bytes | None = None
    ) -> Pair:
        """Write a certificate for `host`, which ended already where `days` is negative, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            _builder(_name(name), key.public_key(), timedelta(days=days))
            .issuer_name(self._name)
            .add_extension(x509.SubjectAlternativeName([_host(host)]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
        )
        pair = Pair(certificate=self.folder / f"{name}.pem", key=self.folder / f"{name}.key.pem")
        pair.certificate.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))
        encryption = (
            serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
        )
        pair.key.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
        )
        return pair

    def server(
        self,
        name: str = "server",
        *,
        host: str = "127.0.0.1",
        days: float = 1,
        asks: bool = False,
        newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3,
    ) -> ssl.SSLContext:
        """Return a server's context; with `asks` it takes only clients with a certificate of this authority."""
        pair = self.issue(name, host=host, days=days)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.maximum_version = newest
        context.load_cert_chain(pair.certificate, pair.key)
        if asks:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.file)
        return context


_USAGES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


def _builder(name: x509.Name, key: ec.EllipticCurvePublicKey, validity: timedelta) -> x509.CertificateBuilder:
    end = datetime.now(UTC) + validity
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(end - timedelta(days=5))
        .not_valid_after(end)
    )


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _identifier(key: ec.EllipticCurvePrivateKey) -> x509.SubjectKeyIdentifier:
    return x509.SubjectKeyIdentifier.from_public_key(key.public_key())


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def proxying(*, login: str = "") -> Serve:
    """Be a proxy: CONNECT for tunnels, absolute addresses for plain http; ask for `login` (user:password)."""
    expected = f"proxy-authorization: basic {b64encode(login.encode()).decode()}".lower()

    def serve(server: RawServer, connection: socket.socket) -> None:
        if not server.read_head(connection):
            return
        head = server.requests[-1]
        method, target, _ = head.split("\r\n")[0].split(" ")
        if login and expected not in head.lower().split("\r\n"):
            connection.sendall(b"HTTP/1.1 407 No\r\nContent-Length: 0\r\n\r\n")
            return
        parts = urlsplit(f"//{target}" if method == "CONNECT" else target)
        with socket.create_connection((parts.hostname or "", parts.port or 80)) as upstream:
            if method == "CONNECT":
                connection.sendall(ESTABLISHED)
            else:
                there = head.replace(f"http://{parts.netloc}", "", 1)
                upstream.sendall(f"{there}\r\n\r\n".encode("latin-1"))
            _relay(server, connection, upstream)

    return serve


def forwarding(port: int) -> Serve:
    """Carry what comes to another port of this machine, but for connections that `server` has forgotten."""

    def serve(server: RawServer, connection: socket.socket) -> None:
        number = server.connections
        with socket.create_connection(("127.0.0.1", port)) as upstream:
            _relay(server, connection, upstream, is_forgotten=lambda: number <= server.forgotten)

    return serve


def _relay(server: RawServer, *ends: socket.socket, is_forgotten: Callable[[], bool] = lambda: False) -> None:
    """Carry bytes both ways until one end closes; by one thread, because TLS sockets bear no two."""
    others = dict(zip(ends, reversed(ends), strict=True))
    while not server.ended.is_set():
        unread = [end for end in ends if isinstance(end, ssl.SSLSocket) and end.pending()]
        for end in unread or select.select(ends, [], [], 0.05)[0]:
            if not (more := end.recv(65536)):
                return
            if is_forgotten():
                server.lost_bytes += len(more)
            else:
                with suppress(ConnectionError):  # what the other end sent before it closed is still carried
                    others[end].sendall(more)
