"""Find the address of IMDS outside a virtual network: an environment variable, then DHCP option 245.

Inside a virtual network the address is always 169.254.169.254 and nobody needs this module. It only reads
files and never raises for what they hold. On Windows only the environment variable counts.
"""

import ipaddress
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# Set by Azure-Samples/virtual-machines-scheduled-events-discover-endpoint-for-non-vnet-vm, discovery.py.
ENVIRONMENT_VARIABLE = "SCHEDULEDEVENTSIP"

_MAX_LEASE_BYTES = 1024 * 1024
_ADDRESS_BYTES = 4
_OPTION_CODE = 245

# Takes a lease file, returns the content of its option 245, None without one; ValueError if damaged.
_Parser = Callable[[bytes], bytes | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Discovered:
    """An address of IMDS and where it was found."""

    address: str  # a dotted quad
    found_in: str  # for an operator to read


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """What a search found, and what it passed over on the way."""

    found: Discovered | None
    notes: tuple[str, ...]  # one for each place that was looked at in vain, for an operator to read


def discover(*, environ: Mapping[str, str], root: Path = Path("/")) -> Discovered | None:
    """Return the address that the environment or the newest usable DHCP lease gives, or None."""
    return search(environ=environ, root=root).found


def search(*, environ: Mapping[str, str], root: Path = Path("/")) -> Search:
    """Look for the address as `discover` does, and say also what was passed over and why."""
    notes: list[str] = []
    found = _from_environment(environ, notes) or _from_leases(root, notes)
    return Search(found=found, notes=tuple(notes))


def _from_environment(environ: Mapping[str, str], notes: list[str]) -> Discovered | None:
    where = f"the environment variable {ENVIRONMENT_VARIABLE}"
    value = environ.get(ENVIRONMENT_VARIABLE)
    if value is None:
        notes.append(f"{where} is not set")
        return None
    try:
        return Discovered(address=_usable(ipaddress.IPv4Address(value.strip())), found_in=where)
    except ValueError:
        notes.append(f"{where} holds no usable IPv4 address: {value[:40]!r}")
        return None


def _from_leases(root: Path, notes: list[str]) -> Discovered | None:
    if sys.platform == "win32":  # leases are no files there, and any user could make these folders
        notes.append("no lease of a DHCP client is read on Windows")
        return None
    leases = list(_leases(root, notes))
    if not leases:
        notes.append("no lease of a DHCP client was found")
    # A client that no longer runs leaves its leases behind: the file written last counts.
    for path, client, parse in sorted(leases, key=lambda lease: _modified_ns(lease[0]), reverse=True):
        where = f"{path} ({client})"
        try:
            option = parse(_read(path))
            if option is not None:
                return Discovered(address=_unpack(option), found_in=f"DHCP option {_OPTION_CODE} in {where}")
            notes.append(f"{where} has no DHCP option {_OPTION_CODE}")
        except OSError as error:
            notes.append(f"{where} cannot be read: {error.strerror}")
        except ValueError as error:
            notes.append(f"{where} {error}")
    return None


def _leases(root: Path, notes: list[str]) -> Iterator[tuple[Path, str, _Parser]]:
    for client, folder, name, parse in _PLACES:
        try:
            paths = sorted(path for path in (root / folder).iterdir() if re.fullmatch(name, path.name))
        except (FileNotFoundError, NotADirectoryError):
            continue  # this client is not in use here
        except OSError as error:
            # NetworkManager and others keep their folder to root: the operator must learn of it.
            notes.append(f"{root / folder} ({client}) cannot be listed: {error.strerror}")
            continue
        yield from ((path, client, parse) for path in paths)


def _modified_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0  # reading it will fail too, and be noted then


def _read(path: Path) -> bytes:
    if not path.is_file():  # opening a named pipe would block
        raise ValueError("is no regular file")
    with path.open("rb") as file:
        raw = file.read(_MAX_LEASE_BYTES + 1)
    if len(raw) > _MAX_LEASE_BYTES:
        raise ValueError("is larger than 1 MiB")
    return raw


def _unpack(option: bytes) -> str:
    if len(option) != _ADDRESS_BYTES:
        raise ValueError(f"has a DHCP option {_OPTION_CODE} that is not four bytes")
    return _usable(ipaddress.IPv4Address(option))


def _usable(address: ipaddress.IPv4Address) -> str:
    if address.is_unspecified or address.is_multicast or address.is_reserved:  # broadcast is reserved
        raise ValueError(f"gives {address}, which is no address of a host")
    return str(address)


# The parsers of text decode latin-1, in which no byte is an error.
_HEX = re.compile(r"(?:[0-9a-f]{1,2}:){3}[0-9a-f]{1,2}|[0-9a-f]{8}", re.IGNORECASE)
_DHCLIENT_INTERFACE = re.compile(r'\s+interface\s+"([^"]*)";')
_DHCLIENT_OPTION = re.compile(r'\s+option\s+unknown-245\s+(".*"|[^;"]*);')
_KEYED = re.compile(
    r'(?:^OPTION_245=|^dhcp4\.(?:private|unknown)_245=|"(?:private|unknown)_245":\s*")([^"\s]*)', re.MULTILINE
)
_WICKED = re.compile(r"<unknown-245>\s*<code>245</code>\s*<data>([^<]*)</data>")


def _from_hex(text: str) -> bytes:
    """Return the four bytes of `a8:3f:81:10` or `a83f8110`, and no bytes for anything else."""
    digits = re.findall(r"[0-9a-fA-F]{1,2}", text) if _HEX.fullmatch(text) else []
    return bytes(int(byte, 16) for byte in digits)


def _dhclient(raw: bytes) -> bytes | None:
    """Read a leases file of ISC dhclient: blocks in order of time, those of all interfaces mixed."""
    current: dict[str, str | None] = {}  # the last block of each interface, the latest one last
    inside, interface, value = False, "", None
    for line in raw.decode("latin-1").split("\n"):
        if line.startswith("lease"):
            inside, interface, value = line.split() == ["lease", "{"], "", None  # not lease6
        elif line.startswith("}") and inside:
            current.pop(interface, None)
            current[interface] = value
            inside = False
        elif match := _DHCLIENT_INTERFACE.match(line):
            interface = match[1]
        elif match := _DHCLIENT_OPTION.match(line):
            value = match[1]
    newest = next((value for value in reversed(current.values()) if value is not None), None)
    return None if newest is None else _dhclient_value(newest)


def _dhclient_value(text: str) -> bytes:
    # ISC's common/options.c (pretty_print_option) writes an unknown option as hex without leading zeros, but
    # as a quoted string with escapes if all its bytes happen to be printable.
    if text.startswith('"'):
        return re.sub(r"\\([0-3][0-7]{2}|.)", _unescape, text[1:-1]).encode("latin-1")
    return _from_hex(text.strip())


def _unescape(match: re.Match[str]) -> str:
    return match[1] if len(match[1]) == 1 else chr(int(match[1], 8))


def _keyed(raw: bytes) -> bytes | None:
    """Read the keys and values that systemd-networkd, NetworkManager and cloud-init's hook write."""
    match = _KEYED.search(raw.decode("latin-1"))
    return _from_hex(match[1]) if match else None


def _wicked(raw: bytes) -> bytes | None:
    """Read a lease of wicked, whose `ipv4:dhcp` without a declared namespace stops XML parsers."""
    match = _WICKED.search(raw.decode("latin-1"))
    return _from_hex(match[1].strip()) if match else None


_COOKIE_AT, _OPTIONS_AT, _COOKIE, _PAD, _END = 236, 240, b"\x63\x82\x53\x63", 0, 255


def _dhcpcd(raw: bytes) -> bytes | None:
    """Read a lease of dhcpcd, the server's packet as it came: walk its options (RFC 2131, 2132)."""
    if raw[_COOKIE_AT:_OPTIONS_AT] != _COOKIE:
        raise ValueError("is no DHCP packet")
    pieces: list[bytes] = []  # of an option that came split (RFC 3396)
    at = _OPTIONS_AT
    while at < len(raw) and raw[at] != _END:
        end = at + 1 if raw[at] == _PAD else at + 2 + int.from_bytes(raw[at + 1 : at + 2])
        if end > len(raw):
            raise ValueError("ends in the middle of a DHCP option")
        if raw[at] == _OPTION_CODE:
            pieces.append(raw[at + 2 : end])
        at = end
    return b"".join(pieces) if pieces else None


# Client, folder, names of its files, parser. Where this stands:
#   dhclient          WALinuxAgent osutil/debian.py and redhat.py, cloud-init net/dhcp.py
#   systemd-networkd  systemd pull request 877, WALinuxAgent osutil/ubuntu.py
#   NetworkManager    nm-config.c (devices, from 1.40), nm-dhcp-utils.c (leases; those of the internal
#                     client hold the option only before 1.22, while it was networkd's)
#   dhcpcd            dhcp.c, defs.h; distributions differ in the folder
#   wicked            leasefile.c, wicked.spec.in
#   cloud-init        dhclient_hook.py of older versions
_PLACES: tuple[tuple[str, str, str, _Parser], ...] = (
    ("dhclient", "var/lib/dhcp", r"dhclient.*\.leases?", _dhclient),
    ("dhclient", "var/lib/dhclient", r".*\.leases?", _dhclient),
    ("dhclient", "run", r"dhclient.*\.leases?", _dhclient),
    ("systemd-networkd", "run/systemd/netif/leases", r"\d+", _keyed),
    ("NetworkManager", "run/NetworkManager/devices", r"\d+", _keyed),
    ("NetworkManager", "var/lib/NetworkManager", r"internal-.*\.lease", _keyed),
    ("NetworkManager", "var/lib/NetworkManager", r"dhclient-.*\.leases?", _dhclient),
    ("dhcpcd", "var/lib/dhcpcd", r".*\.lease", _dhcpcd),
    ("dhcpcd", "var/lib/dhcpcd5", r".*\.lease", _dhcpcd),
    ("dhcpcd", "var/db/dhcpcd", r".*\.lease", _dhcpcd),
    ("wicked", "var/lib/wicked", r"lease-.*-dhcp-ipv4\.xml", _wicked),
    ("wicked", "run/wicked", r"lease-.*-dhcp-ipv4\.xml", _wicked),
    ("cloud-init", "run/cloud-init/dhclient.hooks", r".*\.json", _keyed),
)
