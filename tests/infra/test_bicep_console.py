"""The console on Container Apps: its module, and the console itself with the environment that the module sets."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge.config.loader import load
from bridge.config.models import Config
from bridge.console.process import STOP_SECONDS
from tests.support.bicep import FOLDER, Deployed, deployed, of, tree
from tests.support.bus import SECRET
from tests.support.console import ORIGIN, STRUCTURED, TOKEN, FleetVm, running_console
from tests.support.only import only

README = (FOLDER / "README.md").read_text()
APP = "Microsoft.App/containerApps"
CLIENT_ID = "11111111-1111-1111-1111-111111111111"  # of the console's identity
SIGNED: Mapping[str, Any] = {
    "consoleApprovers": ["approver"],
    "consoleSigningSecretUrl": "https://vault/secrets/signing",
}


def made(**parameters: Any) -> list[Deployed]:
    """Deploy a console in which nobody approves, but for what the parameters say."""
    unsigned = {"consoleApprovers": [], "consoleSigningSecretUrl": ""}
    return deployed("everything", consoleViewers=["viewer"], **{**unsigned, **parameters})


def console(**parameters: Any) -> dict[str, Any]:
    """Return the properties of the container app."""
    found: dict[str, Any] = only(of(APP, made(**parameters))).properties
    return found


def environment(**parameters: Any) -> dict[str, str]:
    """Return the environment that the console gets, with the values of its secrets."""
    container = only(console(**parameters)["template"]["containers"])
    return {one["name"]: one.get("value", SECRET) for one in container["env"]}


def loaded(folder: Path, variables: Mapping[str, str]) -> Config:
    file = folder / "config.toml"
    file.touch()
    return load(file, variables)


def test_the_environment_of_the_console_is_a_valid_configuration(tmp_path: Path) -> None:
    config = loaded(tmp_path, environment())
    assert config.console
    assert config.console.bus
    ingress = console()["configuration"]["ingress"]
    assert config.console.listen == f"0.0.0.0:{ingress['targetPort']}"
    container = only(console()["template"]["containers"])
    assert {probe["httpGet"]["port"] for probe in container["probes"]} == {ingress["targetPort"]}
    assert (config.console.auth, config.console.viewer_groups) == ("easyauth", ("viewer",))
    assert config.console.public_url == "https://contoso.a-b-1.westeurope.azurecontainerapps.io"
    assert not config.console.takes_ingest
    bus = config.console.bus
    assert bus.namespace == "contoso-maintenance.servicebus.windows.net"
    assert (bus.topic, bus.subscription, bus.client_id) == ("scheduled-events", "console", CLIENT_ID)


def test_the_console_may_send_commands_only_if_somebody_may_approve(tmp_path: Path) -> None:
    assert loaded(tmp_path, environment()).approvals is None
    config = loaded(tmp_path, environment(**SIGNED))
    assert config.console
    assert config.console.bus
    assert config.approvals
    assert config.console.approver_groups == ("approver",)
    assert config.approvals.signing_secrets
    assert config.approvals.client_id == CLIENT_ID
    approvals = config.approvals
    assert (approvals.namespace, approvals.queue) == (config.console.bus.namespace, "approvals")
    assert f'session = "{config.approvals.session}"' in README  # as forward and listen have it
    assert "imds-bridge-console-sender" not in {one.name for one in made()}


def test_the_secret_that_signs_commands_stays_in_the_key_vault() -> None:
    secret = console(**SIGNED)["configuration"]["secrets"][-1]
    container = only(console(**SIGNED)["template"]["containers"])
    assert secret["keyVaultUrl"] == SIGNED["consoleSigningSecretUrl"]
    assert secret["identity"] == "Microsoft.ManagedIdentity/userAssignedIdentities/contoso"
    assert [one["secretRef"] for one in container["env"] if "secretRef" in one] == [secret["name"]]
    assert environment(**{**SIGNED, "consoleApprovers": []}) == environment()


def test_the_parameters_and_the_app_roles_of_the_readme_fit() -> None:
    given = json.loads(re.findall(r"```json\n(.*?)```", README, re.DOTALL)[-1])
    assert given.keys() <= tree("main.bicep")["parameters"].keys()
    roles = json.loads(README.partition("> roles.json <<'EOF'\n")[2].partition("EOF")[0])
    named = [*given["consoleViewers"]["value"], *given["consoleApprovers"]["value"]]
    assert [role["value"] for role in roles] == named


def test_people_sign_in_with_tokens_for_this_app_before_the_console_may_receive_or_send() -> None:
    parts = made(**SIGNED)
    auth = only(of(f"{APP}/authConfigs", parts)).properties
    entra = auth["identityProviders"]["azureActiveDirectory"]
    secret = only(console()["configuration"]["secrets"])
    assert secret == {"name": entra["registration"]["clientSecretSettingName"], "value": CLIENT_ID}
    allowed = {"allowedApplications": [entra["registration"]["clientId"]]}
    assert entra["validation"]["defaultAuthorizationPolicy"] == allowed
    assert entra["registration"]["clientId"] == "66666666-6666-6666-6666-666666666666"
    assert auth["platform"]["enabled"] is auth["httpSettings"]["requireHttps"] is True
    assert auth["globalValidation"]["unauthenticatedClientAction"] == "RedirectToLoginPage"
    assert console()["configuration"]["ingress"]["allowInsecure"] is False
    later = [
        one for one in parts if one.name in ("imds-bridge-console-subscription", "imds-bridge-console-sender")
    ]
    assert [one.body["dependsOn"] for one in later] == [["auth"], ["auth"]]


def test_the_one_writer_of_a_store_is_given_the_time_to_end_and_a_volume_where_it_writes() -> None:
    template = console()["template"]
    assert template["scale"]["maxReplicas"] == 1
    assert template["terminationGracePeriodSeconds"] > 2 * STOP_SECONDS
    assert template["containers"][0]["volumeMounts"][0]["mountPath"] == str(Config().state_dir)


def test_a_forged_principal_does_not_pass_for_a_sender_and_one_without_its_groups_may_not_look(
    tmp_path: Path,
) -> None:
    def signed_in(**claims: str) -> dict[str, str]:
        """Return the header in which Container Apps says who is signed in."""
        given = [
            {"typ": kind, "val": value} for kind, value in {"preferred_username": "ana", **claims}.items()
        ]
        return {"X-MS-CLIENT-PRINCIPAL": b64encode(json.dumps({"claims": given}).encode()).decode()}

    settings: dict[str, Any] = {"auth": "easyauth", "public_url": ORIGIN, "ingest": {"bearer_token": TOKEN}}
    viewer = signed_in(roles="viewer")
    too_many_groups = signed_in(_claim_names='{"groups":"src1"}', hasgroups="true")
    with running_console(tmp_path, viewer_groups=["viewer"], **settings) as found:
        answers = [found.get("/", one).status_code for one in ({}, signed_in(), too_many_groups, viewer)]
        assert answers == [401, 403, 403, 200]
        assert found.post(FleetVm("web-0").heartbeat(), {**STRUCTURED, **viewer}).status_code == 401
