"""Random damage to the outbox's files: whatever they contain, it starts, publishes, and loses no readable row."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from bridge.events.filters import Filter
from bridge.outbox.outbox import REJECTED, dead_letter
from tests.support.outbox import commit, deliver, event, kill, open_outbox, waiting

TRIALS = int(os.environ.get("TEST_DAMAGE_TRIALS", "60"))
SECTOR_BYTES = 512
SIZES = (0, 0, 200, 1200, 3000, 3900, 4100, 9000)
SINKS = {"a": (Filter(), True)}


@dataclass(frozen=True, kw_only=True)
class Template:
    """A state as a process left it; `bodies` are those of the events that sink `a` still has to get."""

    path: Path
    bodies: dict[str, bytes]


def make_template(path: Path, rng: random.Random, *, killed: bool) -> Template:
    """Run an outbox for a while, and stop or kill it."""
    running = path / "running"
    outbox = open_outbox(running, sinks=SINKS)
    bodies: dict[str, bytes] = {}
    for number in range(rng.randint(10, 60)):
        made, body = event(f"{number:06d}", size=rng.choice(SIZES))
        filled = body.replace(b"xxxxxxxx", rng.randbytes(4).hex().encode())
        bodies[made.id] = filled
        outbox.commit(
            [(made, filled)],
            meta={"watch": made.id},
            occurrences={made.id: 1},
            records={("kind", made.id): {}},
        )
        if rng.random() < 0.3:
            bodies = {name: bodies[name] for name in bodies if name not in deliver(outbox, limit=1)}
        if rng.random() < 0.1:
            generation, page = outbox.pending("a", 1)
            for stored in page:
                dead = dead_letter("a", stored, REJECTED, "400", stored.stored_at)
                outbox.acknowledge("a", generation, page, dead_lettered=dead)
                del bodies[stored.id]
    if rng.random() < 0.5:
        outbox.shift(3600.0)
    assert waiting(outbox) == list(bodies)
    if killed:
        return Template(path=kill(outbox, running, path / "killed"), bodies=bodies)
    outbox.close()
    return Template(path=running, bodies=bodies)


def zero_sector(file: Path, rng: random.Random) -> None:
    with file.open("r+b") as opened:
        opened.seek(rng.randrange(file.stat().st_size) // SECTOR_BYTES * SECTOR_BYTES)
        opened.write(bytes(SECTOR_BYTES))


def flip_bits(file: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    for _ in range(rng.randint(1, 8)):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def truncate(file: Path, rng: random.Random) -> None:
    os.truncate(file, rng.randrange(file.stat().st_size))


DAMAGES: list[Callable[[Path, random.Random], None]] = [
    zero_sector,
    zero_sector,
    flip_bits,
    flip_bits,
    truncate,
]


def damage(folder: Path, rng: random.Random) -> list[str]:
    """Damage one or a few of the files; return what was done."""
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        file = rng.choice([path for path in folder.glob("outbox.db*") if path.stat().st_size])
        change = rng.choice(DAMAGES)
        change(file, rng)
        done.append(f"{change.__name__} {file.name}")
        if not any(path.stat().st_size for path in folder.glob("outbox.db*")):
            break
    if rng.random() < 0.2:
        (folder / "outbox.db-shm").write_bytes(rng.randbytes(rng.randrange(1, 40_000)))
    return done


def readable(folder: Path, bodies: dict[str, bytes]) -> list[str]:
    """Return the events whose body is still there in one piece."""
    content = b"".join(path.read_bytes() for path in folder.glob("outbox.db*"))
    return [name for name, body in bodies.items() if body in content]


def check_damaged(folder: Path, template: Template, done: list[str]) -> None:
    left = readable(folder, template.bodies)
    with closing(open_outbox(folder, sinks=SINKS)) as outbox:
        assert outbox.storage_error is None
        assert commit(outbox, "new")
        got: list[str] = []
        while page := deliver(outbox, limit=3):
            got += page
        assert outbox.storage_error is None
        assert got == sorted(got), "an event came out of order"
        assert got[-1] == "new"
        assert len(set(got)) == len(got), "an event came twice"
        missing = [name for name in left if name not in got]
        # A few bytes beside a body can make it unreadable: those of its checksum, for example.
        assert len(missing) <= len(done) * 8 // 3 + 1, f"{missing} can be read"
        if set(template.bodies) - set(got) and not any("truncate" in one for one in done):
            assert outbox.losses(), "a loss was not noted"
        outbox.prune()
        outbox.record("kind", "000001")
        outbox.occurrences("000001")
        outbox.dead_letter_counts()
        assert outbox.storage_error is None
    with closing(open_outbox(folder, sinks=SINKS)) as outbox:
        assert waiting(outbox) == []
    assert len(list(folder.glob("outbox.db.damaged-*[0-9]"))) <= 1, "it was damaged again"


@pytest.mark.timeout(0 if TRIALS > 1000 else 300)
def test_whatever_the_files_contain_the_outbox_starts_and_delivers_what_can_be_read(tmp_path: Path) -> None:
    seed = int(os.environ.get("TEST_DAMAGE_SEED", random.SystemRandom().randrange(2**32)))
    print(f"TEST_DAMAGE_SEED={seed} TEST_DAMAGE_TRIALS={TRIALS} repeats these damages")
    rng = random.Random(seed)  # noqa: S311 - it is to be repeatable
    templates = [make_template(tmp_path / str(n), rng, killed=n % 3 > 0) for n in range(12)]
    for trial in range(TRIALS):
        folder = tmp_path / f"trial-{trial}"
        template = rng.choice(templates)
        shutil.copytree(template.path, folder)
        done = damage(folder, rng)
        try:
            check_damaged(folder, template, done)
        except BaseException as error:
            error.add_note(f"trial {trial}: {done}")
            raise
        shutil.rmtree(folder)
