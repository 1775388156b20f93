"""Put single mistakes into the code, one at a time, and print which of them no test notices."""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tools.mutants.mistakes import Mistake, mistakes, with_mistake
from tools.mutants.scratch import Scratch, TestMap, map_tests

PACKAGES = ("imds", "events", "outbox", "approvals", "delivery", "forward", "process", "sinks")
TEST_SECONDS = 30
BUDGET_SECONDS = 45.0  # of tests for each mistake, as long as they took without it
LIMIT_SECONDS = 4 * BUDGET_SECONDS


def main() -> int:
    """Try a random choice of mistakes; 0 whatever comes of it, for a person judges the list."""
    options = _options()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**32)
    outcomes: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        scratch = Scratch(Path(folder))
        print(f"seed {seed}; running the tests once, to see which lines each of them runs ...", flush=True)
        tests = map_tests(scratch)
        for path, mistake in choose(scratch.folder, options.packages, options.count, seed):
            began_at = time.monotonic()
            outcome = attempt(scratch, path, mistake, tests)
            outcomes[Path(path).parent.name, outcome] += 1
            took = f"({time.monotonic() - began_at:.0f} s)"
            print(f"{outcome} {path}:{mistake.first_line}  {mistake.text}  {took}", flush=True)
    for (package, outcome), count in sorted(outcomes.items()):
        print(f"{package:<10} {outcome:<9} {count:>4}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="how many mistakes to try (default: 200)")
    parser.add_argument("--seed", type=int, help="repeats a choice (default: another one each time)")
    parser.add_argument("packages", nargs="*", default=PACKAGES, help=f"default: {' '.join(PACKAGES)}")
    return parser.parse_args()


def choose(root: Path, packages: list[str], count: int, seed: int) -> list[tuple[str, Mistake]]:
    """Choose mistakes and their modules, every one of the packages with the same chance."""
    paths = [path for package in packages for path in sorted((root / "bridge" / package).rglob("*.py"))]
    everything = [
        (str(path.relative_to(root)), mistake)
        for path in paths
        for mistake in mistakes(path.read_text(encoding="utf-8"))
    ]
    return random.Random(seed).sample(everything, min(count, len(everything)))  # noqa: S311 - no secret


def attempt(scratch: Scratch, path: str, mistake: Mistake, tests: TestMap) -> str:
    """Make the mistake in the copy and run the tests of its lines; return what came of it."""
    chosen = list(_within_budget(tests.tests_of(path, mistake.first_line, mistake.last_line), tests))
    if not chosen:
        return "NOT-RUN"
    target, listing = scratch.folder / path, scratch.folder / "tests.txt"
    source = target.read_text(encoding="utf-8")
    listing.write_text("\n".join(chosen))
    target.write_text(with_mistake(source, mistake.number), encoding="utf-8")
    try:
        code, _ = scratch.run("-x", f"--timeout={TEST_SECONDS}", f"@{listing}", limit_seconds=LIMIT_SECONDS)
    finally:
        target.write_text(source, encoding="utf-8")
    return {0: "UNNOTICED", None: "TOO-LONG"}.get(code, "noticed")


def _within_budget(chosen: list[str], tests: TestMap) -> Iterator[str]:
    left = BUDGET_SECONDS
    for test in chosen:
        left -= tests.seconds.get(test, 0.0)
        if left < 0:
            return
        yield test


if __name__ == "__main__":
    raise SystemExit(main())
