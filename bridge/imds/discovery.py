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
from contextlib import suppress
from pathlib import Path

# Set by Azure-Samples/virtual-machines-scheduled-events-discover-endpoint-for-non-vnet-vm, discovery.py.
ENVIRONMENT_VARIABLE = "SCHEDULEDEVENTSIP"


def search(*, environ: Mapping[str, str], root: Path = Path("/")) -> tuple[str, str] | None:
    """Return the address of IMDS and where it was found: in the environment, else in the lease written last."""
    if address := _usable(environ.get(ENVIRONMENT_VARIABLE, "").strip()):
        return address, f"the environment variable {ENVIRONMENT_VARIABLE}"
    # A client that no longer runs leaves its leases in place: the file that was written last counts.
    for _, path, client, option in sorted(_leases(root), reverse=True):
        if address := _usable(_from_hex(option)):
            return address, f"DHCP option 245 in {path} ({client})"
    return None


def _usable(text: str) -> str:
    """Return an IPv4 address that a host can have, else ""."""
    with suppress(ValueError):
        address = ipaddress.IPv4Address(text)
        # Broadcast is reserved.
        return "" if address.is_unspecified or address.is_multicast or address.is_reserved else text
    return ""


def _leases(root: Path) -> Iterator[tuple[int, Path, str, str]]:
    """Yield when a lease was written, its file and client, and its option 245."""
    if sys.platform == "win32":  # leases are not files there, and any user could create these folders
        return
    for client, folder, name, parse in _PLACES:
        with suppress(OSError):  # this client is not in use here, or only root may list its folder
            for path in (root / folder).iterdir():
                if re.fullmatch(name, path.name):
                    with suppress(OSError):
                        # In latin-1 every byte is valid.
                        yield path.stat().st_mtime_ns, path, client, parse(path.read_text("latin-1"))


_HEX = re.compile(r"(?:[0-9a-f]{1,2}:){3}[0-9a-f]{1,2}|[0-9a-f]{8}", re.IGNORECASE)
# Whole blocks: one that is still being written has no end, and one of `lease6` is of DHCPv6.
_DHCLIENT_LEASE = re.compile(r"^lease[ \t]+\{[ \t\r]*\n((?:(?!lease|\}).*\n)*)\}", re.MULTILINE)
_DHCLIENT_INTERFACE = re.compile(r'^[ \t]+interface[ \t]+"([^"\n]*)";', re.MULTILINE)
_DHCLIENT_OPTION = re.compile(r"^[ \t]+option[ \t]+unknown-245[ \t]+([^;\n]*);", re.MULTILINE)
_NETWORKD = re.compile(r'^OPTION_245=([^"\s]*)', re.MULTILINE)


def _from_hex(text: str) -> str:
    """Return the address that `a8:3f:81:10` or `a83f8110` stands for; "" if it is no such text."""
    digits = re.findall(r"[0-9a-fA-F]{1,2}", text) if _HEX.fullmatch(text) else []
    return ".".join(str(int(byte, 16)) for byte in digits)


def _dhclient(text: str) -> str:
    """Read a leases file of ISC dhclient: blocks of all interfaces, in order of time."""
    current: dict[str, str] = {}  # the last block of each interface, the latest one last
    for block in _DHCLIENT_LEASE.findall(text):
        interface = _last(_DHCLIENT_INTERFACE, block)
        current.pop(interface, None)
        current[interface] = _last(_DHCLIENT_OPTION, block).strip()
    return next(filter(None, reversed(current.values())), "")


def _last(pattern: re.Pattern[str], block: str) -> str:
    return next(reversed(pattern.findall(block)), "")


def _networkd(text: str) -> str:
    """Read the keys and values that systemd-networkd writes."""
    match = _NETWORKD.search(text)
    return match[1] if match else ""


# Client, folder, names of its files, parser; for the images of Azure that have these clients:
#   systemd-networkd  Ubuntu from 18.04, Debian from 12, Flatcar, Azure Linux
#   dhclient          Ubuntu 16.04, Debian to 11, RHEL 7
_PLACES: tuple[tuple[str, str, str, Callable[[str], str]], ...] = (
    ("dhclient", "var/lib/dhcp", r"dhclient.*\.leases?", _dhclient),
    ("dhclient", "var/lib/dhclient", r".*\.leases?", _dhclient),
    ("dhclient", "run", r"dhclient.*\.leases?", _dhclient),
    ("systemd-networkd", "run/systemd/netif/leases", r"\d+", _networkd),
)
