"""What the tests of the listener share."""

from __future__ import annotations

import pytest

from tests.support.listener import ListenerRig, MakeListener


@pytest.fixture
def rig(make_listener: MakeListener) -> ListenerRig:
    """Return a listener whose policy allows everything, and that has no auto rule."""
    return make_listener()
