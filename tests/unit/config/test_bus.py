"""AMQP without TLS goes to this machine only, unless the configuration says otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.azure.servicebus import connect
from bridge.config.base import Secret
from bridge.config.bus import ReceiverSettings, ServiceBusSettings
from bridge.errors import Misconfigured

KEY = "SharedAccessKeyName=a;SharedAccessKey=c2VjcmV0"
PLAIN = "UseDevelopmentEmulator=true"


@pytest.mark.parametrize(
    "text",
    [
        f"Endpoint=sb://bus.example;{KEY};{PLAIN};",
        f"Endpoint=sb://bus.example:5672/;{KEY};{PLAIN}",
        f"{PLAIN};Endpoint=sb://192.0.2.1;{KEY}",
        f"Endpoint=sb://bus.example;{KEY}; usedevelopmentemulator = TRUE ;",
        f"Endpoint=sb://localhost.example;{KEY};{PLAIN}",
    ],
)
@pytest.mark.parametrize("settings", [ReceiverSettings, ServiceBusSettings])
def test_plain_amqp_to_another_machine_is_refused_unless_it_is_allowed(
    settings: type[ReceiverSettings] | type[ServiceBusSettings], text: str
) -> None:
    given = {"queue": "q", "connection_string": text}
    if settings is ServiceBusSettings:
        given["kind"] = "servicebus"
    with pytest.raises(ValueError, match="allow_http = true") as caught:
        settings.model_validate(given)
    assert "c2VjcmV0" not in str(caught.value).partition("[type=")[0]
    assert settings.model_validate({**given, "allow_http": True})


@pytest.mark.parametrize(
    "text",
    [
        f"Endpoint=sb://127.0.0.1:5672;{KEY};{PLAIN};",
        f"Endpoint=sb://localhost;{KEY};{PLAIN};",
        f"Endpoint=sb://[::1]:5672;{KEY};{PLAIN};",
        f"Endpoint=sb://bus.example;{KEY}",
        f"Endpoint=sb://bus.example;{KEY};UseDevelopmentEmulator=false",
    ],
)
def test_plain_amqp_to_this_machine_and_tls_to_any_are_accepted(text: str) -> None:
    assert ReceiverSettings(queue="q", connection_string=Secret(text))


def test_a_connection_string_that_becomes_plain_while_running_is_not_used(tmp_path: Path) -> None:
    file = tmp_path / "connection"
    file.write_text(f"Endpoint=sb://bus.example;{KEY}")
    settings = ReceiverSettings(queue="q", connection_string=Secret(file=file))
    file.write_text(f"Endpoint=sb://bus.example;{KEY};{PLAIN}")
    with pytest.raises(Misconfigured, match="allow_http = true") as caught:
        connect(settings)
    assert "c2VjcmV0" not in str(caught.value)
