"""Finding the address of IMDS from the environment and from the leases of DHCP clients."""

import ipaddress
import os
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.imds.discovery import search
from tests.support.diff import steady, trials
from tests.support.paths import DATA

LEASES = DATA / "leases"
WIRE = "168.63.129.16"  # a8:3f:81:10
DHCLIENT = "var/lib/dhcp/dhclient.eth0.leases"
NETWORKD = "run/systemd/netif/leases/2"
NO_OPTION = 'lease {{\n  interface "{}";\n}}\n'


def dhclient(value: str) -> str:
    return f'lease {{\n  interface "eth0";\n  option unknown-245 {value};\n}}\n'


def put(root: Path, place: str, content: bytes | str, *, age_seconds: int = 0) -> Path:
    path = root / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode("latin-1"))
    os.utime(path, (1_772_847_669 - age_seconds,) * 2)
    return path


def address(root: Path, **environ: str) -> str | None:
    found = search(environ=environ, root=root)
    return found[0] if found else None


# The environment


NO_ADDRESSES = ["", "imds.example", "http://100.64.0.1", "100.64.0.1:80", "fd00::1", "100.64.0.256", "x" * 40]


@pytest.mark.posix("leases are read on POSIX only")
@pytest.mark.parametrize("value", [" 100.64.0.1\n", *NO_ADDRESSES, "0.0.0.0"])  # noqa: S104  (a value to refuse)
def test_a_valid_environment_variable_goes_before_the_leases(tmp_path: Path, value: str) -> None:
    put(tmp_path, NETWORKD, "OPTION_245=a83f8110\n")
    found = search(environ={"SCHEDULEDEVENTSIP": value}, root=tmp_path)
    if value == " 100.64.0.1\n":
        assert found == ("100.64.0.1", "the environment variable SCHEDULEDEVENTSIP")
    else:
        assert found == (WIRE, f"DHCP option 245 in {tmp_path / NETWORKD} (systemd-networkd)")


# Where leases are


@pytest.mark.posix("leases are read on POSIX only")
@pytest.mark.parametrize(
    ("client", "place"),
    [
        ("dhclient", DHCLIENT),
        ("dhclient", "var/lib/dhcp/dhclient.leases"),
        ("dhclient", "var/lib/dhclient/dhclient-eth0.leases"),
        ("dhclient", "var/lib/dhclient/dhclient--eth0.lease"),
        ("dhclient", "run/dhclient.lease"),
        ("systemd-networkd", NETWORKD),
    ],
)
def test_each_client_s_lease_gives_the_address(tmp_path: Path, client: str, place: str) -> None:
    recorded = LEASES / ("networkd" if place == NETWORKD else "dhclient.leases")
    path = put(tmp_path, place, recorded.read_bytes())
    assert search(environ={}, root=tmp_path) == (WIRE, f"DHCP option 245 in {path} ({client})")


@pytest.mark.posix("leases are read on POSIX only")
def test_the_lease_written_last_with_option_245_wins_whatever_its_client(tmp_path: Path) -> None:
    put(tmp_path, DHCLIENT, dhclient("64:40:0:1"), age_seconds=60)
    put(tmp_path, "run/systemd/netif/leases/3", "OPTION_245=64400002\n", age_seconds=10)
    put(tmp_path, "run/systemd/netif/leases/4", "ADDRESS=10.0.0.4\n", age_seconds=5)
    put(tmp_path, NETWORKD, "OPTION_245=64400003\n", age_seconds=30)
    assert address(tmp_path) == "100.64.0.2"


@pytest.mark.parametrize(
    "place", ["var/lib/dhcp/dhcpd.leases", "var/lib/dhcp/dhclient.leases~", "run/systemd/netif/leases/.#2abc"]
)
def test_other_files_of_the_same_folders_are_not_leases(tmp_path: Path, place: str) -> None:
    put(tmp_path, place, "OPTION_245=a83f8110\n" + dhclient("a8:3f:81:10"))
    assert address(tmp_path) is None


# Values


@pytest.mark.posix("leases are read on POSIX only")
@pytest.mark.parametrize(
    ("later", "expected"),
    [
        (dhclient("64:40:0:2"), "100.64.0.2"),  # the last block of an interface is the current one
        (dhclient("A8:3F:81:10"), WIRE),  # letter case and leading zeros do not matter
        (dhclient("5:4:3:2"), "5.4.3.2"),
        (NO_OPTION.format("eth0"), None),  # also without the option
        (NO_OPTION.format("eth1"), "100.64.0.1"),  # of another interface
        (dhclient("64:40:0:2").removesuffix("}\n"), "100.64.0.1"),  # still being written
        (dhclient("64:40:0:2").replace("lease", "lease6"), "100.64.0.1"),  # of DHCPv6
    ],
)
def test_the_last_block_of_an_interface_counts(tmp_path: Path, later: str, expected: str | None) -> None:
    put(tmp_path, DHCLIENT, dhclient("64:40:0:1") + later)
    assert address(tmp_path) == expected


NOT_FOUR_BYTES = ["", "a8:3f:81", "a8:3f:81:10:11", "a8:3f:81:110", "a8:3f:81:-1", WIRE, '"abc"', "zz"]


@pytest.mark.parametrize("value", [*NOT_FOUR_BYTES, "00000000", "ffffffff", "e0000001", "f0000001"])
def test_a_value_that_is_not_the_address_of_a_host_is_refused(tmp_path: Path, value: str) -> None:
    put(tmp_path, DHCLIENT, dhclient(value))
    put(tmp_path, NETWORKD, f"OPTION_245={value}\n")
    assert address(tmp_path) is None


# Files that cannot be read or trusted


def test_no_lease_is_read_where_any_user_may_write_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, DHCLIENT, dhclient("a8:3f:81:10"))
    monkeypatch.setattr(sys, "platform", "win32")
    assert address(tmp_path) is None
    assert address(tmp_path, SCHEDULEDEVENTSIP=WIRE) == WIRE


@pytest.mark.posix("leases are read on POSIX only")
def test_what_cannot_be_read_or_listed_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "var/lib/dhclient/dhclient-eth1.leases").mkdir(parents=True)  # in place of a file
    put(tmp_path, "run/systemd/netif/leases", b"")  # in place of a folder
    listed = put(tmp_path, "var/lib/dhcp/dhclient.leases", dhclient("64:40:0:2"))
    put(tmp_path, "run/dhclient.lease", dhclient("64:40:0:1"), age_seconds=60)
    assert address(tmp_path) == "100.64.0.2"
    read, listing = Path.read_text, Path.iterdir

    def refuse(path: Path, *arguments: object) -> object:
        if path in (listed, listed.parent):
            raise PermissionError(13, "Permission denied")
        return read(path, "latin-1") if arguments else listing(path)

    for method in ("read_text", "iterdir"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, method, refuse)
            assert address(tmp_path) == "100.64.0.1"


# Any content

BYTES = st.binary(max_size=300) | st.text('0123456789abcdef:;"\\\n{}<>', max_size=60).map(str.encode)


@settings(steady, max_examples=trials(60))
@given(content=BYTES, variable=st.text())
def test_no_content_of_a_lease_or_variable_raises_or_gives_nonsense(content: bytes, variable: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        put(Path(folder), DHCLIENT, b"lease {\n  option unknown-245 " + content)
        put(Path(folder), NETWORKD, b"OPTION_245=" + content)
        found = address(Path(folder), SCHEDULEDEVENTSIP=variable)
    if found is not None:
        parsed = ipaddress.IPv4Address(found)
        assert not any((parsed.is_unspecified, parsed.is_multicast, parsed.is_reserved))
