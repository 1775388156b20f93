"""Put single mistakes into the code, one at a time, and print which of them no test notices."""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mistakes import Mistake, mistakes, with_mistake
from tests.mutants.scratch import SUITES, Scratch, TestMap, map_tests

PACKAGES = ("imds", "events", "outbox", "approvals", "sinks", "service")
TEST_SECONDS = 30
BUDGET_SECONDS = 45.0  # of tests for each mistake, as long as they took without it
LIMIT_SECONDS = 4 * BUDGET_SECONDS


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One mistake in one module."""

    path: str
    mistake: Mistake

    @property
    def package(self) -> str:
        return Path(self.path).parent.name


def main() -> int:
    """Try a random choice of mistakes; 0 whatever comes of it, for a person judges the list."""
    options = _options()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**32)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        scratch = Scratch(Path(folder))
        print(f"seed {seed}; running the tests once, to see which lines each of them runs ...", flush=True)
        tests = map_tests(scratch, options.tests, options.jobs)
        trials = choose(scratch.folder, options.packages, options.count, seed)
        outcomes = Counter(try_all(scratch, trials, tests))
    for line in summary(outcomes):
        print(line)
    return 0


def try_all(scratch: Scratch, trials: list[Trial], tests: TestMap) -> Iterator[tuple[str, bool]]:
    """Print what comes of each trial; yield its package and whether a test noticed."""
    for number, trial in enumerate(trials, 1):
        began_at = time.monotonic()
        outcome = attempt(scratch, trial, tests)
        place = f"{trial.path}:{trial.mistake.first_line}"
        took = f"({time.monotonic() - began_at:.0f} s)"
        print(f"{number}/{len(trials)} {outcome} {place}  {trial.mistake.text}  {took}", flush=True)
        yield trial.package, outcome == "noticed"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="how many mistakes to try (default: 200)")
    parser.add_argument("--seed", type=int, help="repeats a choice (default: another one each time)")
    parser.add_argument("--jobs", type=int, default=2, help="processes of the first run (default: 2)")
    parser.add_argument("--tests", nargs="+", default=SUITES, help=f"default: {' '.join(SUITES)}")
    parser.add_argument("packages", nargs="*", default=PACKAGES, help=f"default: {' '.join(PACKAGES)}")
    return parser.parse_args()


def choose(root: Path, packages: list[str], count: int, seed: int) -> list[Trial]:
    """Choose mistakes, every one of the packages with the same chance."""
    paths = [path for package in packages for path in sorted((root / "bridge" / package).rglob("*.py"))]
    everything = [
        Trial(path=str(path.relative_to(root)), mistake=mistake)
        for path in paths
        for mistake in mistakes(path.read_text(encoding="utf-8"))
    ]
    return random.Random(seed).sample(everything, min(count, len(everything)))  # noqa: S311 - no secret


def attempt(scratch: Scratch, trial: Trial, tests: TestMap) -> str:
    """Make the mistake in the copy and run the tests of its lines; return what came of it."""
    line = trial.mistake
    chosen = list(_within_budget(tests.tests_of(trial.path, line.first_line, line.last_line), tests))
    if not chosen:
        return "NOT-RUN"
    target = scratch.folder / trial.path
    source = target.read_text(encoding="utf-8")
    listing = scratch.folder / "tests.txt"
    listing.write_text("\n".join(chosen))
    target.write_text(with_mistake(source, line.number), encoding="utf-8")
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


def summary(outcomes: Counter[tuple[str, bool]]) -> Iterator[str]:
    """Write the share of mistakes that tests noticed, for each package and for all."""
    for package in [*sorted({package for package, _ in outcomes}), ""]:
        noticed, missed = (
            sum(count for (name, was), count in outcomes.items() if was is wanted and package in ("", name))
            for wanted in (True, False)
        )
        yield f"{package or 'all':<10} {noticed:>4} of {noticed + missed:>4} noticed"


if __name__ == "__main__":
    raise SystemExit(main())
