"""Proton, the engine of AMQP; used untyped, as its annotations are incomplete and partly wrong."""

from __future__ import annotations

from typing import Any

import proton as _proton

proton: Any = _proton
