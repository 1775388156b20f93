"""Finding the address of IMDS from the environment and from the leases of DHCP clients."""

import ipaddress
import os
import sys
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


def test_the_environment_variable_gives_the_address(tmp_path: Path) -> None:
    assert search(environ={"SCHEDULEDEVENTSIP": " 100.64.0.1\n"}, root=tmp_path) == Search(
        found=Discovered(address="100.64.0.1", found_in="the environment variable SCHEDULEDEVENTSIP"),
        notes=(),
    )


def test_the_environment_variable_beats_every_lease(tmp_path: Path) -> None:
    put(tmp_path, *NETWORKD[1:])
    found = search(environ={"SCHEDULEDEVENTSIP": "100.64.0.1"}, root=tmp_path).found
    assert found is not None
    assert found.address == "100.64.0.1"


@pytest.mark.parametrize(
    "value",
    ["", "imds.example", "http://100.64.0.1", "100.64.0.1:80", "fd00::1", "100.64.0.256", "0.0.0.0"],  # noqa: S104  (a value to refuse)
)
def test_an_invalid_environment_variable_is_skipped_and_noted(tmp_path: Path, value: str) -> None:
    put(tmp_path, *NETWORKD[1:])
    result = search(environ={"SCHEDULEDEVENTSIP": value}, root=tmp_path)
    assert result.found is not None
    assert result.found.address == WIRE
    assert result.notes == (
        f"the environment variable SCHEDULEDEVENTSIP is not a usable IPv4 address: {value!r}",
    )


def test_a_long_environment_variable_is_truncated_in_the_note(tmp_path: Path) -> None:
    result = search(environ={"SCHEDULEDEVENTSIP": "x" * 10_000}, root=tmp_path)
    assert len(result.notes[0]) < 200


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


def test_nothing_is_found_under_a_root_that_does_not_exist(tmp_path: Path) -> None:
    assert address(tmp_path / "absent") is None


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


def test_the_last_block_of_a_dhclient_file_is_the_current_one(tmp_path: Path) -> None:
    put(tmp_path, DHCLIENT[1], dhclient("64:40:0:1") + dhclient("64:40:0:2"))
    assert address(tmp_path) == "100.64.0.2"


def test_a_last_block_without_the_option_replaces_an_earlier_one(tmp_path: Path) -> None:
    put(tmp_path, DHCLIENT[1], dhclient("64:40:0:1") + 'lease {\n  interface "eth0";\n}\n')
    assert only_note(search(environ={}, root=tmp_path)).endswith("has no DHCP option 245")


def test_a_later_block_of_another_interface_replaces_nothing(tmp_path: Path) -> None:
    put(tmp_path, DHCLIENT[1], dhclient("64:40:0:1") + 'lease {\n  interface "eth1";\n}\n')
    assert address(tmp_path) == "100.64.0.1"


def test_a_dhclient_block_that_is_still_being_written_does_not_count(tmp_path: Path) -> None:
    put(tmp_path, DHCLIENT[1], dhclient("64:40:0:1") + dhclient("64:40:0:2").removesuffix("}\n"))
    assert address(tmp_path) == "100.64.0.1"


def test_blocks_of_dhcpv6_are_ignored(tmp_path: Path) -> None:
    put(tmp_path, DHCLIENT[1], dhclient("64:40:0:1") + dhclient("64:40:0:2").replace("lease", "lease6"))
    assert address(tmp_path) == "100.64.0.1"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a8:3f:81:10", WIRE),
        ("A8:3F:81:10", WIRE),
        ("5:4:3:2", "5.4.3.2"),
        ('"bcde"', "98.99.100.101"),
        (r'"\250?\201\020"', WIRE),
        (r'"b\"\\}"', "98.34.92.125"),
        (r'"\$\'\`;"', "36.39.96.59"),
        (r'"\0001ab"', "0.49.97.98"),
    ],
)
def test_dhclient_writes_hex_or_a_quoted_string_with_escapes(
    tmp_path: Path, value: str, expected: str
) -> None:
    put(tmp_path, DHCLIENT[1], dhclient(value))
    assert address(tmp_path) == expected


# Invalid values


@pytest.mark.parametrize(
    "value",
    ["", "a8:3f:81", "a8:3f:81:10:11", "a8:3f:81:110", "a8:3f:81:-1", "168.63.129.16", '"abc"', '""', "zz"],
)
def test_a_value_that_is_not_four_bytes_is_refused(tmp_path: Path, value: str) -> None:
    put(tmp_path, DHCLIENT[1], dhclient(value))
    assert only_note(search(environ={}, root=tmp_path)).endswith(
        "has a DHCP option 245 that is not four bytes"
    )


@pytest.mark.parametrize("value", ["00000000", "ffffffff", "e0000001", "efffffff", "f0000001"])
def test_unspecified_multicast_and_broadcast_addresses_are_refused(tmp_path: Path, value: str) -> None:
    put(tmp_path, NETWORKD[1], f"OPTION_245={value}\n")
    assert only_note(search(environ={}, root=tmp_path)).endswith("which is not the address of a host")


# Files that cannot be read


@pytest.mark.parametrize(("client", "place", "content"), CLIENTS, ids=[place for _, place, _ in CLIENTS])
def test_a_lease_larger_than_1_mib_is_skipped_and_noted(
    tmp_path: Path, client: str, place: str, content: bytes
) -> None:
    path = put(tmp_path, place, content + b"\n" * 1024 * 1024)
    assert only_note(search(environ={}, root=tmp_path)) == f"{path} ({client}) is larger than 1 MiB"


def test_a_folder_in_place_of_a_lease_is_skipped_and_noted(tmp_path: Path) -> None:
    (tmp_path / NETWORKD[1]).mkdir(parents=True)
    assert only_note(search(environ={}, root=tmp_path)).endswith("is not a regular file")


def test_a_file_in_place_of_a_folder_is_skipped(tmp_path: Path) -> None:
    put(tmp_path, "run/systemd/netif/leases", b"")
    put(tmp_path, *DHCLIENT[1:])
    assert address(tmp_path) == WIRE


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there, named pipes differ")
def test_a_dangling_link_and_a_named_pipe_are_skipped_and_noted(tmp_path: Path) -> None:
    folder = tmp_path / "run/systemd/netif/leases"
    folder.mkdir(parents=True)
    (folder / "2").symlink_to(folder / "gone")
    os.mkfifo(folder / "3")
    notes = search(environ={}, root=tmp_path).notes
    assert sorted(notes[1:]) == [
        f"{folder / '2'} (systemd-networkd) is not a regular file",
        f"{folder / '3'} (systemd-networkd) is not a regular file",
    ]


def test_a_lease_that_may_not_be_read_is_skipped_and_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    put(tmp_path, *NETWORKD[1:])
    monkeypatch.setattr(Path, "open", refuse)
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


@pytest.mark.parametrize("place", [place for _, place, _ in CLIENTS])
@settings(steady, max_examples=60)
@given(content=BYTES)
def test_no_content_of_a_lease_raises_or_gives_nonsense(place: str, content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        put(Path(folder), place, content)
        found = address(Path(folder))
    if found is not None:
        parsed = ipaddress.IPv4Address(found)
        assert not any((parsed.is_unspecified, parsed.is_multicast, parsed.is_reserved))


@steady
@given(value=st.text())
def test_no_value_of_the_environment_variable_raises(value: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        search(environ={"SCHEDULEDEVENTSIP": value}, root=Path(folder))


@steady
@given(octets=st.binary(min_size=4, max_size=4))
def test_hex_and_octal_forms_of_one_value_agree(octets: bytes) -> None:
    forms = [octets.hex(":"), ":".join(f"{octet:x}" for octet in octets)]
    forms.append('"' + "".join(f"\\{octet:03o}" for octet in octets) + '"')
    with tempfile.TemporaryDirectory() as folder:
        results = set()
        for form in forms:
            put(Path(folder), DHCLIENT[1], dhclient(form))
            results.add(address(Path(folder)))
    assert len(results) == 1
