"""How often, and with which seed, tests of random instants and damages try."""

from __future__ import annotations

import os
import random


def kills(few: int) -> int:
    """Return how many processes a test kills: `few`, or more where TEST_KILLS says so."""
    return max(few, int(os.environ.get("TEST_KILLS", "0")))


def random_instants() -> random.Random:
    """Choose a seed unless TEST_KILL_SEED gives one, and print it: pytest shows that when a test fails."""
    seed = int(os.environ.get("TEST_KILL_SEED", random.SystemRandom().randrange(2**32)))
    print(f"TEST_KILL_SEED={seed} chooses the same instants and faults again")
    return random.Random(seed)  # noqa: S311 - it shall be repeatable
