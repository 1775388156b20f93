"""Find the address of IMDS outside a virtual network: an environment variable, then DHCP option 245.

Every VM of Azure Resource Manager is in a virtual network, where the address is 169.254.169.254, and does not need
this module. It only reads files, and raises nothing for what they contain. On Windows, and with DHCP clients other
than dhclient and systemd-networkd, only the environment variable counts.

I/O: the environment and the DHCP lease files.
"""

import ipaddress
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# Set by Azure-Samples/virtual-machines-scheduled-events-discover-endpoint-for-non-vnet-vm, discovery.py.
ENVIRONMENT_VARIABLE = "SCHEDULEDEVENTSIP"

_ADDRESS_BYTES = 4
_OPTION_CODE = 245

# Takes a lease file and returns the content of its option 245, None without one; ValueError if damaged.
_Parser = Callable[[bytes], bytes | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Discovered:
    """An address of IMDS and where it was found."""

    address: str  # a dotted quad
    found_in: str  # for an operator to read


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """What a search found, and the places without an address."""

    found: Discovered | None
    notes: tuple[str, ...]  # one for each place without a usable address, for an operator to read


def search(*, environ: Mapping[str, str], root: Path = Path("/")) -> Search:
    """Look for the address in the environment, then in the DHCP lease that was written last."""
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
        notes.append(f"{where} is not a usable IPv4 address: {value[:40]!r}")
        return None


def _from_leases(root: Path, notes: list[str]) -> Discovered | None:
    if sys.platform == "win32":  # leases are not files there, and any user could create these folders
        notes.append("DHCP leases are not read on Windows")
        return None
    leases = list(_leases(root, notes))
    if not leases:
        notes.append("there is no DHCP lease")
    # A client that no longer runs leaves its leases in place: the file that was written last counts.
    for path, client, parse in sorted(leases, key=lambda lease: _modified_ns(lease[0]), reverse=True):
        where = f"{path} ({client})"
        try:
            option = parse(path.read_bytes())
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
            # Only root may list the folders of some clients, which the operator has to know.
            notes.append(f"{root / folder} ({client}) cannot be listed: {error.strerror}")
            continue
        yield from ((path, client, parse) for path in paths)


def _modified_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0  # reading it fails too, and is noted then


def _unpack(option: bytes) -> str:
    if len(option) != _ADDRESS_BYTES:
        raise ValueError(f"has a DHCP option {_OPTION_CODE} that is not four bytes")
    return _usable(ipaddress.IPv4Address(option))


def _usable(address: ipaddress.IPv4Address) -> str:
    if address.is_unspecified or address.is_multicast or address.is_reserved:  # broadcast is reserved
        raise ValueError(f"gives {address}, which is not the address of a host")
    return str(address)


# The parsers decode latin-1, in which every byte is valid.
_HEX = re.compile(r"(?:[0-9a-f]{1,2}:){3}[0-9a-f]{1,2}|[0-9a-f]{8}", re.IGNORECASE)
_DHCLIENT_INTERFACE = re.compile(r'\s+interface\s+"([^"]*)";')
_DHCLIENT_OPTION = re.compile(r"\s+option\s+unknown-245\s+([^;]*);")
_NETWORKD = re.compile(r'^OPTION_245=([^"\s]*)', re.MULTILINE)


def _from_hex(text: str) -> bytes:
    """Return the four bytes of `a8:3f:81:10` or `a83f8110`, else no bytes."""
    digits = re.findall(r"[0-9a-fA-F]{1,2}", text) if _HEX.fullmatch(text) else []
    return bytes(int(byte, 16) for byte in digits)


def _dhclient(raw: bytes) -> bytes | None:
    """Read a leases file of ISC dhclient: blocks of all interfaces, in order of time."""
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
    return None if newest is None else _from_hex(newest.strip())


def _networkd(raw: bytes) -> bytes | None:
    """Read the keys and values that systemd-networkd writes."""
    match = _NETWORKD.search(raw.decode("latin-1"))
    return _from_hex(match[1]) if match else None


# Client, folder, names of its files, parser; for the images of Azure that have these clients:
#   systemd-networkd  Ubuntu from 18.04, Debian from 12, Flatcar, Azure Linux
#   dhclient          Ubuntu 16.04, Debian to 11, RHEL 7
_PLACES: tuple[tuple[str, str, str, _Parser], ...] = (
    ("dhclient", "var/lib/dhcp", r"dhclient.*\.leases?", _dhclient),
    ("dhclient", "var/lib/dhclient", r".*\.leases?", _dhclient),
    ("dhclient", "run", r"dhclient.*\.leases?", _dhclient),
    ("systemd-networkd", "run/systemd/netif/leases", r"\d+", _networkd),
)
