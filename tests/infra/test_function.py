"""The Function app that stores an audit trail, called as its host calls it; the table is Azurite's."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from azure.core.credentials import AzureNamedKeyCredential
from azure.data.tables import TableServiceClient
from azure.functions.meta import Datum
from azure.functions.servicebus import ServiceBusMessageInConverter

from bridge.formats.samples import samples
from bridge.http.signing import sign
from tests.support.bus import SECRET
from tests.support.npm import node_modules
from tests.support.only import only
from tests.support.paths import ROOT
from tests.support.process import environment, stored_event

pytestmark = pytest.mark.timeout(600)  # npm installs Azurite

HOME = ROOT / "infra/consumers/function"
AT = datetime.now(UTC)
ACCOUNT, KEY = "lab", "bm9ib2R5J3Mga2V5"  # not a real key
# Azurite, which also prints its port.
AZURITE = """
const { Server } = require("net");
const listen = Server.prototype.listen;
Server.prototype.listen = function (...given) {
  this.once("listening", () => console.log("port " + this.address().port));
  return listen.apply(this, given);
};
require("azurite/dist/src/table/main.js");
"""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[TableServiceClient]:
    options = ["--tableHost", "127.0.0.1", "--tablePort", "0", "--inMemoryPersistence", "--disableTelemetry"]
    extra = {"NODE_PATH": str(node_modules("azurite")), "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}
    command = ["node", "-e", AZURITE, "azurite", *options, "--skipApiVersionCheck", "--silent"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(extra), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        try:
            port = next(line for line in process.stdout if line.startswith("port ")).split()[1]
            address = f"http://127.0.0.1:{port}/{ACCOUNT}"
            with TableServiceClient(address, credential=AzureNamedKeyCredential(ACCOUNT, KEY)) as client:
                yield client
        finally:
            process.kill()


@pytest.fixture
def app(service: TableServiceClient, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Load the app as the worker does, with this table."""
    monkeypatch.syspath_prepend(HOME)
    module = import_module("function_app")
    table = module.AuditTable(service)
    monkeypatch.setattr(module, "audit_table", lambda: table)
    return module


def call(app: ModuleType, body: bytes, headers: dict[str, str] | None = None) -> None:
    """Call the function with a message as its library decodes it."""
    metadata = {
        "EnqueuedTimeUtc": AT.isoformat(),
        "ApplicationProperties": headers or {},
        "UserProperties": headers or {},
    }
    given = {name: Datum(json.dumps(value), "json") for name, value in metadata.items()}
    app.audit._function.get_user_function()(
        ServiceBusMessageInConverter.decode(Datum(body, "bytes"), trigger_metadata=given)
    )


def test_an_event_of_every_type_is_kept_once_and_whole_and_what_is_none_is_refused(
    app: ModuleType, service: TableServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIGNING_SECRETS", SECRET)
    events = [*samples(AT), stored_event(1, Description="é" * 100_000)]
    receipts = [event for event in events if ".approval." in event.type]
    signed = receipts[0]
    for event in events * 2:
        call(app, event.body, sign([SECRET], event.id, AT, event.body) if event is signed else None)
    for body in (b"nonsense", b"[]", b'{"specversion": "1.0", "id": "", "source": "a", "type": "b"}'):
        with pytest.raises(ValueError):  # noqa: PT011 - its text is the app's
            call(app, body)
    rows = {row["id"]: row for row in service.get_table_client(app.TABLE).list_entities()}
    whole = {
        id_: "".join(row[f"Body{number}"] for number in range(sum(name.startswith("Body") for name in row)))
        for id_, row in rows.items()
    }
    assert whole == {event.id: event.body.decode() for event in events}
    faults = {event.id: rows[event.id]["SignatureFault"] for event in receipts}
    assert faults.pop(signed.id) == ""
    assert {*faults.values()} == {"it is not signed"}
    # Azure hands out the reference itself where it cannot read the secret, which must not dead-letter receipts.
    monkeypatch.setenv("SIGNING_SECRETS", "@Microsoft.KeyVault(SecretUri=https://contoso.example/signing)")
    later = replace(signed, id="later", body=signed.body.replace(signed.id.encode(), b"later"))
    call(app, later.body, sign([SECRET], later.id, AT, later.body))
    row = only(service.get_table_client(app.TABLE).query_entities("id eq 'later'"))
    assert row["SignatureFault"] == "the app cannot read SIGNING_SECRETS from the Key Vault"
