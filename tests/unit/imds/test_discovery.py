"""Finding the address of IMDS from the environment and from the leases of DHCP clients."""

import ipaddress
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.imds.discovery import Discovered, Search, search
from tests.support.diff import steady
from tests.support.paths import DATA

LEASES = DATA / "leases"
WIRE = "168.63.129.16"  # a8:3f:81:10


def dhclient(value: str) -> str:
    return f'lease {{\n  interface "eth0";\n  option unknown-245 {value};\n}}\n'


DHCLIENT = ("dhclient", "var/lib/dhcp/dhclient.eth0.leases", (LEASES / "dhclient.leases").read_bytes())
NETWORKD = ("systemd-networkd", "run/systemd/netif/leases/2", (LEASES / "networkd").read_bytes())

CLIENTS = [
    DHCLIENT,
    ("dhclient", "var/lib/dhcp/dhclient.leases", DHCLIENT[2]),
    ("dhclient", "var/lib/dhclient/dhclient-eth0.leases", DHCLIENT[2]),
    ("dhclient", "var/lib/dhclient/dhclient--eth0.lease", DHCLIENT[2]),
    ("dhclient", "run/dhclient.lease", DHCLIENT[2]),
    NETWORKD,
]


def put(root: Path, place: str, content: bytes | str, *, age_seconds: int = 0) -> Path:
    path = root / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode("latin-1"))
    os.utime(path, (1_772_847_669 - age_seconds,) * 2)
    return path


def address(root: Path) -> str | None:
    found = search(environ={}, root=root).found
    return found.address if found else None


def only_note(result: Search) -> str:
    """Return the note on the one lease that was skipped."""
    assert result.found is None
    variable, note = result.notes
    assert "SCHEDULEDEVENTSIP" in variable
    return note


# The environment


def test_the_environment_variable_gives_the_address_whatever_the_leases_say(tmp_path: Path) -> None:
    put(tmp_path, *NETWORKD[1:])
    assert search(environ={"SCHEDULEDEVENTSIP": " 100.64.0.1\n"}, root=tmp_path) == Search(
        found=Discovered(address="100.64.0.1", found_in="the environment variable SCHEDULEDEVENTSIP"),
        notes=(),
    )


NO_ADDRESSES = ["", "imds.example", "http://100.64.0.1", "100.64.0.1:80", "fd00::1", "100.64.0.256", "x" * 40]


@pytest.mark.parametrize("value", [*NO_ADDRESSES, "0.0.0.0"])  # noqa: S104  (a value to refuse)
def test_an_invalid_environment_variable_is_skipped_and_noted(tmp_path: Path, value: str) -> None:
    put(tmp_path, *NETWORKD[1:])
    result = search(environ={"SCHEDULEDEVENTSIP": value}, root=tmp_path)
    assert result.found is not None
    assert result.found.address == WIRE
    assert result.notes == (
        f"the environment variable SCHEDULEDEVENTSIP is not a usable IPv4 address: {value!r}",
    )


# Where leases are


@pytest.mark.parametrize(("client", "place", "content"), CLIENTS, ids=[place for _, place, _ in CLIENTS])
def test_each_client_s_lease_gives_the_address(
    tmp_path: Path, client: str, place: str, content: bytes
) -> None:
    path = put(tmp_path, place, content)
    assert search(environ={}, root=tmp_path).found == Discovered(
        address=WIRE, found_in=f"DHCP option 245 in {path} ({client})"
    )


def test_nothing_is_found_without_leases(tmp_path: Path) -> None:
    assert search(environ={}, root=tmp_path) == Search(
        found=None,
        notes=(
            "the environment variable SCHEDULEDEVENTSIP is not set",
            "there is no DHCP lease",
        ),
    )


def test_the_lease_written_last_wins_whatever_its_client(tmp_path: Path) -> None:
    put(tmp_path, DHCLIENT[1], dhclient("64:40:0:1"), age_seconds=60)
    put(tmp_path, "run/systemd/netif/leases/3", "OPTION_245=64400002\n", age_seconds=10)
    put(tmp_path, NETWORKD[1], "OPTION_245=64400003\n", age_seconds=30)
    assert address(tmp_path) == "100.64.0.2"


def test_the_next_older_lease_is_taken_if_the_newest_has_no_option_245(tmp_path: Path) -> None:
    newest = put(tmp_path, NETWORKD[1], b"ADDRESS=10.0.0.4\n")
    put(tmp_path, *DHCLIENT[1:], age_seconds=60)
    result = search(environ={}, root=tmp_path)
    assert result.found is not None
    assert result.found.address == WIRE
    assert result.notes[1:] == (f"{newest} (systemd-networkd) has no DHCP option 245",)


@pytest.mark.parametrize(
    "place",
    [
        "var/lib/dhcp/dhcpd.leases",
        "var/lib/dhcp/dhclient.leases~",
        "run/systemd/netif/leases/.#2abc",
    ],
)
def test_other_files_of_the_same_folders_are_not_leases(tmp_path: Path, place: str) -> None:
    put(tmp_path, place, b"OPTION_245=a83f8110\n")
    assert "there is no DHCP lease" in search(environ={}, root=tmp_path).notes


# ISC dhclient


NO_OPTION = 'lease {{\n  interface "{}";\n}}\n'


@pytest.mark.parametrize(
    ("later", "expected"),
    [
        (dhclient("64:40:0:2"), "100.64.0.2"),  # the last block of an interface is the current one
        (NO_OPTION.format("eth0"), None),  # also without the option
        (NO_OPTION.format("eth1"), "100.64.0.1"),  # of another interface
        (dhclient("64:40:0:2").removesuffix("}\n"), "100.64.0.1"),  # still being written
        (dhclient("64:40:0:2").replace("lease", "lease6"), "100.64.0.1"),  # of DHCPv6
    ],
)
def test_a_later_block_of_the_same_interface_is_the_current_one(
    tmp_path: Path, later: str, expected: str | None
) -> None:
    put(tmp_path, DHCLIENT[1], dhclient("64:40:0:1") + later)
    assert address(tmp_path) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [("a8:3f:81:10", WIRE), ("A8:3F:81:10", WIRE), ("5:4:3:2", "5.4.3.2")]
)
def test_dhclient_writes_hex_without_leading_zeros(tmp_path: Path, value: str, expected: str) -> None:
    put(tmp_path, DHCLIENT[1], dhclient(value))
    assert address(tmp_path) == expected


# Invalid values


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        *[
            (value, "four bytes")
            for value in ("", "a8:3f:81", "a8:3f:81:10:11", "a8:3f:81:110", WIRE, '"abc"')
        ],
        *[(value, "the address of a host") for value in ("00000000", "ffffffff", "e0000001", "f0000001")],
    ],
)
def test_a_value_that_is_not_the_address_of_a_host_is_refused(tmp_path: Path, value: str, fault: str) -> None:
    put(tmp_path, DHCLIENT[1], dhclient(value))
    assert fault in only_note(search(environ={}, root=tmp_path))


# Files that cannot be read


def test_a_folder_in_place_of_a_lease_is_skipped_and_noted(tmp_path: Path) -> None:
    (tmp_path / NETWORKD[1]).mkdir(parents=True)
    assert "cannot be read: " in only_note(search(environ={}, root=tmp_path))


def test_a_file_in_place_of_a_folder_is_skipped(tmp_path: Path) -> None:
    put(tmp_path, "run/systemd/netif/leases", b"")
    put(tmp_path, *DHCLIENT[1:])
    assert address(tmp_path) == WIRE


def test_a_lease_that_may_not_be_read_is_skipped_and_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    put(tmp_path, *NETWORKD[1:])
    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert only_note(search(environ={}, root=tmp_path)).endswith("cannot be read: Permission denied")


def test_a_folder_that_may_not_be_listed_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = Path.iterdir

    def refuse(path: Path) -> object:
        if path.name == "leases":
            raise PermissionError(13, "Permission denied")
        return listing(path)

    put(tmp_path, *DHCLIENT[1:])
    monkeypatch.setattr(Path, "iterdir", refuse)
    result = search(environ={}, root=tmp_path)
    assert result.found is not None
    assert result.found.address == WIRE
    folder = tmp_path / "run/systemd/netif/leases"
    assert f"{folder} (systemd-networkd) cannot be listed: Permission denied" in result.notes


# Any content

STARTS = ["", "lease {\n  option unknown-245 ", "OPTION_245="]
BYTES = st.builds(
    lambda start, rest: start + rest,
    st.sampled_from([start.encode() for start in STARTS]),
    st.one_of(st.binary(max_size=300), st.text('0123456789abcdef:;"\\\n{}<>', max_size=60).map(str.encode)),
)


@pytest.mark.parametrize("place", [DHCLIENT[1], NETWORKD[1]])
@settings(steady, max_examples=60)
@given(content=BYTES, variable=st.none() | st.text())
def test_no_content_of_a_lease_or_variable_raises_or_gives_nonsense(
    place: str, content: bytes, variable: str | None
) -> None:
    environ = {} if variable is None else {"SCHEDULEDEVENTSIP": variable}
    with tempfile.TemporaryDirectory() as folder:
        put(Path(folder), place, content)
        found = search(environ=environ, root=Path(folder)).found
    if found is not None:
        parsed = ipaddress.IPv4Address(found.address)
        assert not any((parsed.is_unspecified, parsed.is_multicast, parsed.is_reserved))
