"""The Bicep files: what they deploy fits together, and every role and filter is what it is for. No Azure is here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from bridge.approvals.in_service import PATH
from bridge.config.in_service import InServiceSettings
from bridge.formats.samples import samples
from bridge.lab.servicebus.filters import Sql
from bridge.sinks.servicebus import to_message
from tests.support.bicep import DEPLOYMENT, FILES, FOLDER, Refused, body, deploy, deployed, of, tree
from tests.support.only import only
from tests.support.paths import ROOT
from tests.support.snapshots import PARAMETERS, compare

README = (FOLDER / "README.md").read_text()
APPROVING = (ROOT / "docs" / "approving.md").read_text()
CONSUMERS = FOLDER.parent / "consumers"
KEYWORDS = {"true", "false", "null", "if", "for", "in", "existing"}
BUS, NAME = "Microsoft.ServiceBus/namespaces", "contoso-maintenance"
GRID = "Microsoft.EventGrid/topics"
ROLE = "Microsoft.Authorization/roleAssignments"
STORAGE = "Microsoft.Storage/storageAccounts"
ROLES = {
    "69a216fc-b8fb-44d8-bc22-1f3c2cd27a39": "Azure Service Bus Data Sender",
    "4f6d3b9b-027b-4f4c-9142-0e5a2a2247e0": "Azure Service Bus Data Receiver",
    "d5a91429-5739-47e2-a06b-3470a27159e7": "EventGrid Data Sender",
    "b7e6dc6d-f1e8-4753-8033-0f276bb0955b": "Storage Blob Data Owner",
    "0a9a7e1f-b9d0-4cc4-a60d-0319b160aaa3": "Storage Table Data Contributor",
    "3913510d-42f4-4e42-8a64-420c390055eb": "Monitoring Metrics Publisher",
}
SCALE_SET = {"name": "web", "subnetId": "/subnets/web", "sshPublicKey": "ssh-rsa x"}
BALANCER = {"name": "web", "subnetId": "/subnets/web", "port": 8080}
LOGS = {"workspaceName": "central", "publisherIds": ["1", "1"]}


@pytest.mark.parametrize("file", FILES)
def test_a_file_uses_what_is_declared_and_hands_out_no_key(file: str) -> None:
    raw, parsed = (FOLDER / file).read_text(), tree(file)
    text = re.sub(
        r"(?m)(^|\s)(//|#).*$", "", raw
    )  # without comments, and of strings only the expressions in them
    text = re.sub(r"'(?:\\.|[^'\\\n])*'", lambda one: " ".join(re.findall(r"\$\{([^}]*)\}", one[0])), text)
    local = set(re.findall(r"\bfor (\w+) in", text)) | set(re.findall(r"(\w+) =>", text))
    declarations = r"(?m)^(?:(?:param|output) \w+ \S+|(?:var|resource|module|metadata) \w+|@\w+|\s*\w+:)"
    names = re.findall(r"(?<![.\w])([A-Za-z_]\w*)\b(?!\()", re.sub(declarations, "", text))
    used, values = {*names} - KEYWORDS, {*parsed["parameters"], *parsed.get("variables", {})}
    assert values <= used <= values | {*parsed.get("resources", {}), *parsed.get("modules", {})} | local
    for loaded in re.findall(r"\bload\w+\('([^']+)'", raw):
        assert ((FOLDER / file).parent / loaded).resolve().is_file(), loaded
    assert not re.search(r"(?i)listKeys|listSecrets|AccountKey|SharedAccessKey|authorizationRules", raw)


def test_every_file_is_deployed_with_the_parameters_and_outputs_that_it_has() -> None:
    """A deployment refuses parameters that a module does not have or lacks, and finds no other outputs."""
    made = [one for file in PARAMETERS for one in deployed(file.stem)]
    made += deploy("modules/scaleset.bicep", SCALE_SET) + deploy("modules/loganalytics.bicep", LOGS)
    made += deploy("modules/loadbalancer.bicep", BALANCER)
    assert {one.file for one in made} >= {*FILES}
    example = json.loads((FOLDER / "example.parameters.json").read_text())["parameters"]
    deploy("main.bicep", {name: parameter["value"] for name, parameter in example.items()})


@pytest.mark.parametrize("file", PARAMETERS, ids=lambda file: file.stem)
def test_a_deployment_makes_nothing_twice_and_what_the_list_says(file: Path) -> None:
    """The workflow `test` compares the list with what Bicep itself says."""
    made = deployed(file.stem)
    places = [(one.type, one.scope, one.name.lower()) for one in made]  # which Azure takes for the same
    assert sorted(set(places)) == sorted(places)
    assert max(len(one.name) for one in made if one.type == DEPLOYMENT) <= 64
    found = [{"type": one.type, "name": one.name} for one in made if one.type != DEPLOYMENT]
    snapshot: dict[str, Any] = {"predictedResources": found, "diagnostics": []}
    assert compare(file.stem, snapshot) == [], "run python -m tests.support.bicep"
    first = found.pop(0)
    assert compare(file.stem, snapshot) == [f"only in the list: {file.stem} {first['type']} {first['name']}"]
    assert compare(file.stem, {**snapshot, "diagnostics": ["not evaluated"]}) == []
    found.append({**first, "name": "another"})
    assert compare(file.stem, snapshot)[0] == f"not in the list: {file.stem} {first['type']} another"


IMAGE, CLIENT = {"consoleImage": "contoso.azurecr.io/imds-bridge:0.1.0"}, {"consoleClientId": "6" * 36}
LETTERS = "expected letters, digits and hyphens"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"namespaceName": "contoso_shop"}, f"namespaceName: given contoso_shop, {LETTERS}"),
        ({"namespaceName": "contoso-sb"}, "namespaceName: given contoso-sb, expected an end other than"),
        ({"topicName": "x" * 261}, "topicName: given a length of 261"),
        ({"queueName": "x" * 261}, "queueName: given a length of 261"),
        ({"queueName": "Scheduled-Events"}, "queueName: given Scheduled-Events, expected another name"),
        ({"eventGridTopicName": "con.toso"}, f"eventGridTopicName: given con.toso, {LETTERS}"),
        (
            {"logicAppName": "ask!", "teamId": "1", "channelId": "2"},
            "logicAppName: given ask!, expected letters",
        ),
        ({"logicAppName": "ask", "teamId": "1"}, "logicAppName needs teamId and channelId"),
        ({"functionName": "con_toso"}, f"functionName: given con_toso, {LETTERS}"),
        ({"functionName": "x" * 61}, "functionName: given a length of 61"),
        (
            {"functionStorageName": "Contoso"},
            "functionStorageName: given Contoso, expected lower-case letters",
        ),
        ({"consoleName": "Console", **IMAGE, **CLIENT}, "consoleName: given Console, expected lower-case"),
        ({"consoleName": "console", **IMAGE}, "consoleName needs consoleImage and consoleClientId"),
        ({"consoleName": "console", **CLIENT}, "consoleName needs consoleImage and consoleClientId"),
        ({"privateEndpointSubnetId": "/subnets/x"}, "privateEndpointSubnetId needs sku Premium"),
        ({"listenPrincipalIds": ["A1", "a1"]}, "principal ids: given two spellings of one among .*A1, a1"),
        ({"consoleName": "C", "functionName": "_"}, "functionName: .*; consoleName: .*; consoleName needs"),
    ],
)
def test_what_azure_would_refuse_late_is_refused_at_once(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(Refused, match=expected):
        deployed("minimal", **given)


@pytest.mark.parametrize(("count", "single", "expected"), [(100, True, None), (101, False, False)])
def test_a_scale_set_has_no_extra_vms_and_more_than_a_hundred_need_several_placement_groups(
    count: int, single: bool, expected: bool | None
) -> None:
    values = {**SCALE_SET, "instanceCount": count, "singlePlacementGroup": single}
    made = only(deploy("modules/scaleset.bicep", values))
    assert (made.body["sku"]["capacity"], made.properties["singlePlacementGroup"]) == (count, expected)
    assert made.properties["overprovision"] is False
    with pytest.raises(Refused, match="need singlePlacementGroup false"):
        deploy("modules/scaleset.bicep", {**values, "instanceCount": 101, "singlePlacementGroup": True})


def test_the_load_balancer_asks_the_listener_and_a_vm_has_left_before_it_counts_as_prepared() -> None:
    balancer = only(deploy("modules/loadbalancer.bicep", BALANCER))
    probe, rule = (only(balancer.properties[key]) for key in ("probes", "loadBalancingRules"))
    about, path = probe["properties"], f"{balancer.type}/web"
    port = InServiceSettings().listen.rpartition(":")[2]
    assert (about["protocol"], about["requestPath"], str(about["port"])) == ("Http", PATH, port)
    seconds = about["intervalInSeconds"] * about["probeThreshold"]
    examples = re.findall(r"(?m)^leave_seconds = (\d+)", README + APPROVING)
    assert len(examples) == 2
    assert min(map(int, examples)) > seconds
    pool = only(balancer.properties["backendAddressPools"])["name"]
    front = only(balancer.properties["frontendIPConfigurations"])["name"]
    assert {key: one["id"] for key, one in rule["properties"].items() if isinstance(one, dict)} == {
        "frontendIPConfiguration": f"{path}/frontendIPConfigurations/{front}",
        "backendAddressPool": f"{path}/backendAddressPools/{pool}",
        "probe": f"{path}/probes/{probe['name']}",
    }


@pytest.mark.parametrize("pools", [[], ["/pools/vms"]])
def test_a_scale_set_is_behind_the_load_balancers_that_it_is_given(pools: list[str]) -> None:
    made = only(deploy("modules/scaleset.bicep", {**SCALE_SET, "backendPoolIds": pools}))
    network = made.properties["virtualMachineProfile"]["networkProfile"]
    card = only(network["networkInterfaceConfigurations"])["properties"]
    address = only(card["ipConfigurations"])["properties"]
    assert [one["id"] for one in address["loadBalancerBackendAddressPools"]] == pools


def test_nothing_repairs_or_replaces_a_vm_that_is_away() -> None:
    """The Application Health extension and the health probe of a scale set would: they are nowhere."""
    files = [path for end in ("bicep", "json", "yaml") for path in (ROOT / "infra").rglob(f"*.{end}")]
    assert {path.name for path in files} >= {"scaleset.bicep", "vmss-extension.json", "cloud-init.yaml"}
    repairs = re.compile(r"healthProbe\b|ApplicationHealth|automaticRepairsPolicy")
    assert [str(path) for path in files if repairs.search(path.read_text())] == []


@pytest.mark.parametrize(
    ("type_", "expected"),
    [
        (BUS, {"disableLocalAuth": True, "minimumTlsVersion": "1.2"}),
        (GRID, {"disableLocalAuth": True, "minimumTlsVersionAllowed": "1.2"}),
        (STORAGE, {"allowSharedKeyAccess": False, "allowBlobPublicAccess": False}),
        (f"{BUS}/topics", {"requiresDuplicateDetection": True}),
        (f"{BUS}/queues", {"requiresSession": True, "deadLetteringOnMessageExpiration": True}),
    ],
)
def test_no_key_is_accepted_nothing_expires_unseen_and_repeats_are_found(
    type_: str, expected: dict[str, Any]
) -> None:
    assert expected.items() <= only(of(type_, deployed("everything"))).properties.items()


def test_each_subscription_receives_what_it_is_for_and_what_records_keeps_it_beyond_its_time() -> None:
    wanted = {
        "audit": ["*"],
        "function": ["*"],
        "console": ["*"],
        "relay": ["scheduledevent.*", "approval.*"],
        "receipts": ["approval.*"],
        "logicapp": ["scheduledevent.scheduled.v1"],
    }
    messages = [to_message(event) for event in samples(datetime(2026, 11, 20, tzinfo=UTC))]
    made = deployed("everything")
    found = {one.name: one.properties for one in of(f"{BUS}/topics/subscriptions", made)}
    rules = {one.name: one.properties for one in of(f"{BUS}/topics/subscriptions/rules", made)}
    topic = only(of(f"{BUS}/topics", made)).name
    assert found.keys() == {f"{topic}/{name}" for name in wanted}
    for name, patterns in wanted.items():
        # Another name would leave the default rule, which matches everything.
        takes: Callable[[Any], bool] = Sql(
            rules.pop(f"{topic}/{name}/$Default")["sqlFilter"]["sqlExpression"]
        )
        for message in messages:
            is_wanted = any(fnmatch(str(message.subject), f"io.imdsbridge.{one}") for one in patterns)
            assert takes(message) == is_wanted, (name, message.subject)
        is_kept = found[f"{topic}/{name}"]["deadLetteringOnMessageExpiration"]
        assert is_kept == (name in ("audit", "function")), name
    assert not rules


def test_everybody_has_the_roles_that_they_need_where_they_need_them_and_no_others() -> None:
    """The forwarder's identity is also one of the listeners'."""
    forward, listen, approver, relay = (str(number) * 8 for number in (1, 2, 3, 4))
    workflow, app, console = (
        f"[{name}.principalId]" for name in ("workflow.identity", "app.identity", "identity.properties")
    )
    topic, queue = f"{BUS}/topics/{NAME}/scheduled-events", f"{BUS}/queues/{NAME}/approvals"
    subscription = f"{BUS}/topics/subscriptions/{NAME}/scheduled-events"
    sender, receiver, grid, blobs, tables, metrics = ROLES.values()
    found = set()
    for one in of(ROLE, deployed("everything") + deploy("modules/loganalytics.bicep", LOGS)):
        whom, role = str(one.properties["principalId"]), one.properties["roleDefinitionId"]
        # Nobody has a role under two names, and another one has another.
        assert one.name == f"guid({one.scope}, {whom}, {role})"
        found.add((one.scope, whom.partition("-")[0], ROLES[role.rpartition("/")[2]]))
    assert found == {
        *((topic, one, sender) for one in (forward, listen)),
        *((queue, one, receiver) for one in (forward, listen)),
        *((queue, one, sender) for one in (approver, workflow, console)),
        (f"{subscription}/audit", approver, receiver),
        (f"{subscription}/relay", relay, receiver),
        (f"{subscription}/receipts", approver, receiver),
        (f"{subscription}/function", app, receiver),
        (f"{subscription}/logicapp", workflow, receiver),
        (f"{subscription}/console", console, receiver),
        *((f"{GRID}/contoso-events", one, grid) for one in (forward, listen)),
        *((f"{STORAGE}/contosoaudit", app, one) for one in (blobs, tables)),
        ("Microsoft.Insights/components/contoso", app, metrics),
        ("Microsoft.Insights/dataCollectionRules/imds-bridge", "1", metrics),
    }


def test_whoever_gets_a_role_is_known_before_anything_is_deployed() -> None:
    """Otherwise no name of the role assignment could be made: a module gets who is only known later."""
    for file in FILES:
        for resource in tree(file).get("resources", {}).values():
            if resource["type"] == ROLE:
                loop = resource["config"].get("loop_type", {"detail": {"item_name": ""}})
                known = {*tree(file)["parameters"], loop["detail"]["item_name"]}
                assert body(resource)["properties"]["principalId"] in known


def test_the_function_and_the_workflow_get_what_their_code_reads() -> None:
    program = (CONSUMERS / "function" / "function_app.py").read_text()
    connection = only(set(re.findall(r'connection="(\w+)"', program)))
    wanted = {name for pair in re.findall(r'environ\["(\w+)"\]|"%(\w+)%"', program) for name in pair if name}
    wanted |= {f"{connection}__fullyQualifiedNamespace", "AzureWebJobsStorage__accountName"}
    # Each deployment replaces all settings, and a Function without this one checks no receipt.
    url = "https://contoso.example/signing"
    signing = {"SIGNING_SECRETS": f"@Microsoft.KeyVault(SecretUri={url})"}
    for given, more in ((url, signing), ("", {})):
        made = deployed("everything", functionSigningSecretUrl=given, workspaceId="")
        app = only(of("Microsoft.Web/sites", made)).properties["siteConfig"]["appSettings"]
        settings = {one["name"]: one["value"] for one in app}
        assert settings.keys() == wanted | more.keys()
        assert more.items() <= settings.items()
    definition = (CONSUMERS / "logicapp" / "definition.json").read_text()
    logic = only(of("Microsoft.Logic/workflows", deployed("everything"))).properties["parameters"]
    assert logic.keys() <= json.loads(definition)["parameters"].keys()
    connections = logic["$connections"]["value"]
    assert connections.keys() == set(re.findall(r"\['(\w+)'\]\['connectionId'\]", definition))


def test_dead_letters_a_topic_that_fills_up_and_throttling_are_alerts() -> None:
    found = {}
    made = deployed("minimal", actionGroupIds=["/on-call"])
    for one in of("Microsoft.Insights/metricAlerts", made):
        about = one.properties
        rule = only(about["criteria"]["allOf"])
        dimension = only(rule["dimensions"])
        assert (one.body["location"], about["scopes"]) == ("global", [f"{BUS}/{NAME}"])
        assert about["actions"] == [{"actionGroupId": "/on-call"}]
        assert (rule["metricNamespace"], rule["operator"]) == (BUS, "GreaterThan")
        assert (dimension["name"], dimension["operator"]) == ("EntityName", "Include")
        limit = rule["metricName"], rule["timeAggregation"], rule["threshold"]
        found[one.name.removeprefix(f"{NAME}-")] = (*limit, *dimension["values"])
    # The names and aggregations are those of Azure Monitor's list of metrics for this type.
    assert found == {
        "dead-letters": ("DeadletteredMessages", "Maximum", 0, "*"),
        "topic-size": ("Size", "Maximum", 5120 * 1024 * 1024 // 2, "scheduled-events"),
        "throttled": ("ThrottledRequests", "Total", 0, "*"),
    }
    assert only(of(f"{BUS}/topics", made)).properties["maxSizeInMegabytes"] == 5120


def test_what_never_expires_unseen_has_an_alert_and_the_readme_says_when_it_fills_the_topic() -> None:
    """The days are those of the volumes that docs/architecture.md calculates."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    sizes = dict(
        re.findall(r"^\| (heartbeat|`document.changed`|`scheduledevent).*?\| ([\d,]+)", text, re.MULTILINE)
    )
    heartbeat, document, notice = (int(size.replace(",", "")) for size in sizes.values())
    assert "E = 15,000. c = 3 changes" in text
    changes = 1.5 * 3 / 30.4  # of each VM, each day
    beats = 2 * 24 * heartbeat
    own = beats + changes * notice
    daily = {"all": own + changes * 100 * document, "named": own + changes * document}
    table = README.partition("| VMs |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| ([\d,]+) \| ([\d,]+) days \| ([\d,]+) days \|$", table, re.MULTILINE)
    numbers = [[int(one.replace(",", "")) for one in row] for row in rows]
    size = 5120 * 1024 * 1024
    expected = [[vms, *(int(size / (vms * each)) for each in daily.values())] for vms in (100, 1_000, 10_000)]
    assert numbers == expected


def test_private_endpoints_lead_to_both_and_public_access_is_what_the_parameters_say() -> None:
    """It is written in each deployment: what is not written, Azure may open again."""
    private, public = deployed("private"), deployed("everything")
    for made, access in ((private, "Disabled"), (public, "Enabled")):
        for type_ in (BUS, GRID):
            assert only(of(type_, made)).properties["publicNetworkAccess"] == access
    rule = {"ipMask": "203.0.113.0/24", "action": "Allow"}
    rules = only(of(f"{BUS}/networkRuleSets", public)).properties
    assert (rules["defaultAction"], rules["ipRules"]) == ("Deny", [rule])
    assert only(of(GRID, public)).properties["inboundIpRules"] == [rule]
    # Without ranges the namespace's rules, perhaps made by hand, are not touched.
    assert of(f"{BUS}/networkRuleSets", private) == []
    found = {}
    for one in of("Microsoft.Network/privateEndpoints", private):
        to = only(one.properties["privateLinkServiceConnections"])["properties"]
        record = only(zone for zone in private if zone.name == f"{one.name}/default" and "Dns" in zone.type)
        zone = only(record.properties["privateDnsZoneConfigs"])["properties"]["privateDnsZoneId"]
        assert one.properties["subnet"]["id"].endswith("/subnets/endpoints")
        found[to["privateLinkServiceId"]] = (only(to["groupIds"]), zone.rpartition("/")[2])
    assert found == {
        f"{BUS}/{NAME}": ("namespace", "privatelink.servicebus.windows.net"),
        f"{GRID}/Contoso-Maintenance": ("topic", "privatelink.eventgrid.azure.net"),
    }


def test_logs_and_metrics_of_everything_go_to_the_workspace() -> None:
    made = deployed("everything", workspaceId="/central")
    logged = of("Microsoft.Insights/diagnosticSettings", made)
    assert {one.properties["workspaceId"] for one in logged} == {"/central"}
    assert sorted(one.scope for one in logged) == [
        "Microsoft.App/managedEnvironments/contoso",
        f"{GRID}/contoso-events",
        "Microsoft.Logic/workflows/contoso",
        f"{BUS}/{NAME}",
    ]
    insights = only(of("Microsoft.Insights/components", made))
    assert insights.properties["WorkspaceResourceId"] == "/central"


@pytest.mark.parametrize(("own", "ranges"), [("", []), ("/subnets/mine", ["203.0.113.7"])])
def test_the_storage_of_the_function_is_open_to_its_subnet_and_to_given_addresses_only(
    own: str, ranges: list[str]
) -> None:
    made = deployed("everything", functionSubnetId=own, functionStorageAllowedIpRanges=ranges)
    subnet = own or "Microsoft.Network/virtualNetworks/contoso/subnets/function"
    rules = only(of(STORAGE, made)).properties["networkAcls"]
    assert (rules["defaultAction"], rules["virtualNetworkRules"]) == (
        "Deny",
        [{"id": subnet, "action": "Allow"}],
    )
    assert rules["ipRules"] == [{"value": one, "action": "Allow"} for one in ranges]
    app = only(of("Microsoft.Web/sites", made))
    assert app.properties["virtualNetworkSubnetId"] == subnet  # so that the app itself reaches it
    for network in of("Microsoft.Network/virtualNetworks", made):
        about = only(network.properties["subnets"])
        assert about["name"] == "function"
        delegated = [one["properties"]["serviceName"] for one in about["properties"]["delegations"]]
        assert delegated == ["Microsoft.App/environments"]  # of Flex Consumption
        assert about["properties"]["serviceEndpoints"] == [{"service": "Microsoft.Storage"}]
    assert len(of("Microsoft.Network/virtualNetworks", made)) == (0 if own else 1)
    for name in ("functionSubnetId", "functionStorageAllowedIpRanges"):
        assert not tree("main.bicep")["parameters"][name]["default"]


def test_the_readme_names_every_parameter_about_networks_and_alerts() -> None:
    names = [
        name
        for name in tree("main.bicep")["parameters"]
        if re.search("(?i)subnet|dns|public|ranges|action", name)
    ]
    assert len(names) == 9
    assert [name for name in names if not re.search(rf"[`\"]{name}[`\"]", README)] == []


def test_the_readme_names_required_parameters_and_the_entities_that_are_deployed() -> None:
    parameters = tree("main.bicep")["parameters"]
    both = [*parameters.items(), *tree("modules/scaleset.bicep")["parameters"].items()]
    needed = [name for name, parameter in both if parameter["default"] is None]
    assert [name for name in needed if not re.search(rf"\b{name}\b", README)] == []
    named = {
        key: set(re.findall(rf'\b(?:receipts_)?{key} = "(.*?)"', README))
        for key in ("topic", "queue", "subscription")
    }
    assert named == {
        "topic": {parameters["topicName"]["default"]},
        "queue": {parameters["queueName"]["default"]},
        "subscription": {"relay", "receipts"},
    }
