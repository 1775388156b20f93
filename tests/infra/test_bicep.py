"""The Bicep files: names and references fit, and every role and filter is what it is for. Nothing is deployed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from bridge.formats.samples import samples
from bridge.lab.servicebus.filters import Sql
from bridge.sinks.servicebus import to_message
from tests.support.bicep import (
    DEPLOYMENT,
    FILES,
    FOLDER,
    Refused,
    body,
    deploy,
    dotted,
    evaluate,
    properties,
    read_parameters,
    resources,
    tree,
)
from tests.support.only import only
from tests.support.paths import ROOT
from tests.support.snapshots import DATA, PARAMETERS, compare

README = (FOLDER / "README.md").read_text()
MINIMAL, EVERYTHING = DATA / "minimal.bicepparam", DATA / "everything.bicepparam"

KEYWORDS = {"true", "false", "null", "if", "for", "in", "existing"}
BUS = "Microsoft.ServiceBus/namespaces"
ROLE = "Microsoft.Authorization/roleAssignments"
STORAGE = "Microsoft.Storage/storageAccounts"
SENDER = "69a216fc-b8fb-44d8-bc22-1f3c2cd27a39"  # Azure Service Bus Data Sender
RECEIVER = "4f6d3b9b-027b-4f4c-9142-0e5a2a2247e0"  # Azure Service Bus Data Receiver
GRID_SENDER = "d5a91429-5739-47e2-a06b-3470a27159e7"  # EventGrid Data Sender
BLOB_OWNER = "b7e6dc6d-f1e8-4753-8033-0f276bb0955b"  # Storage Blob Data Owner
TABLE_CONTRIBUTOR = "0a9a7e1f-b9d0-4cc4-a60d-0319b160aaa3"  # Storage Table Data Contributor
METRICS_PUBLISHER = "3913510d-42f4-4e42-8a64-420c390055eb"  # Monitoring Metrics Publisher

# The role assignments: the principal ids, the role, and its scope.
ROLES = {
    ("modules/servicebus.bicep", "publisherIds", SENDER, f"{BUS}/topics"),
    ("modules/servicebus.bicep", "listenerIds", RECEIVER, f"{BUS}/queues"),
    ("modules/servicebus.bicep", "approverIds", SENDER, f"{BUS}/queues"),
    ("modules/subscription.bicep", "receiverIds", RECEIVER, f"{BUS}/topics/subscriptions"),
    ("modules/eventgrid.bicep", "publisherIds", GRID_SENDER, "Microsoft.EventGrid/topics"),
    (
        "modules/loganalytics.bicep",
        "publishers",
        METRICS_PUBLISHER,
        "Microsoft.Insights/dataCollectionRules",
    ),
    ("modules/sender.bicep", "principalId", SENDER, f"{BUS}/queues"),
    ("modules/functionroles.bicep", "principalId", BLOB_OWNER, STORAGE),
    ("modules/functionroles.bicep", "principalId", TABLE_CONTRIBUTOR, STORAGE),
    ("modules/functionroles.bicep", "principalId", METRICS_PUBLISHER, "Microsoft.Insights/components"),
}


def required(file: str) -> set[str]:
    """Return the parameters without a default; none of the files has one that is null."""
    return {name for name, parameter in tree(file)["parameters"].items() if parameter["default"] is None}


def modules() -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Return every use of a module: the file, the name there, the module's file and the parameters given."""
    for file in FILES:
        for name, module in tree(file).get("modules", {}).items():
            used = (FOLDER / file).parent / module["detail"]["path"]
            yield file, name, used.relative_to(FOLDER).as_posix(), body(module)["params"]


def code(file: str) -> str:
    """Return a file without comments and strings, but with the expressions in strings."""
    text = re.sub(r"(?m)(^|\s)(//|#).*$", "", (FOLDER / file).read_text())
    return re.sub(r"'(?:\\.|[^'\\\n])*'", lambda one: " ".join(re.findall(r"\$\{([^}]*)\}", one[0])), text)


def names_used(text: str) -> set[str]:
    """Return the names that code refers to: no declarations, decorators, types, keys, properties or functions."""
    left = re.sub(
        r"(?m)^(?:(?:param|output) \w+ \S+|(?:var|resource|module|metadata) \w+|@\w+|\s*\w+:)", "", text
    )
    return set(re.findall(r"(?<![.\w])([A-Za-z_]\w*)\b(?!\()", left)) - KEYWORDS


@pytest.mark.parametrize("file", FILES)
def test_a_file_uses_what_is_declared_and_hands_out_no_key(file: str) -> None:
    raw, text = (FOLDER / file).read_text(), code(file)
    declared = {name: kind for kind, name in re.findall(r"(?m)^(param|var|resource|module) (\w+)", text)}
    local = set(re.findall(r"\bfor (\w+) in", text)) | set(re.findall(r"(\w+) =>", text))
    used = names_used(text)
    assert used <= declared.keys() | local
    assert {name for name, kind in declared.items() if kind in ("param", "var")} <= used
    for loaded in re.findall(r"\bload\w+\('([^']+)'", raw):
        assert ((FOLDER / file).parent / loaded).resolve().is_file(), loaded
    assert not re.search(r"(?i)listKeys|listSecrets|AccountKey|SharedAccessKey|authorizationRules", raw)


def test_every_module_gets_the_parameters_that_it_has_and_has_the_outputs_that_are_read() -> None:
    used = list(modules())
    for file, name, module, given in used:
        assert given.keys() <= tree(module)["parameters"].keys(), (file, name)
        assert required(module) <= given.keys(), (file, name)
        read = set(re.findall(rf"\b{name}!?\.outputs\.(\w+)", (FOLDER / file).read_text()))
        assert read <= tree(module).get("outputs", {}).keys(), (file, name)
    alone = {"main.bicep", "modules/scaleset.bicep", "modules/loganalytics.bicep"}
    assert {module for _, _, module, _ in used} | alone == set(FILES)
    example = json.loads((FOLDER / "example.parameters.json").read_text())["parameters"]
    assert required("main.bicep") <= example.keys() <= tree("main.bicep")["parameters"].keys()


@pytest.mark.parametrize("file", PARAMETERS, ids=lambda file: file.stem)
def test_a_deployment_makes_nothing_twice_and_what_the_list_says(file: Path) -> None:
    """The workflow `test` compares the list with what Bicep itself says."""
    made = [*deploy(*read_parameters(file))]
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
    template, parameters = read_parameters(MINIMAL)
    with pytest.raises(Refused, match=expected):
        [*deploy(template, {**parameters, **given})]


def test_a_scale_set_has_no_extra_vms_and_more_than_a_hundred_need_several_placement_groups() -> None:
    _, _, scale_set = only(resources("Microsoft.Compute/virtualMachineScaleSets"))
    assert scale_set["properties"]["overprovision"] is False
    capacity, several = scale_set["sku"]["capacity"], scale_set["properties"]["singlePlacementGroup"]
    for count, single, expected in ((100, True, (100, None)), (101, False, (101, False))):
        values = {"instanceCount": count, "singlePlacementGroup": single}
        assert (evaluate(capacity, values), evaluate(several, values)) == expected
    with pytest.raises(Refused, match="need singlePlacementGroup false"):
        evaluate(capacity, {"instanceCount": 101, "singlePlacementGroup": True})


@pytest.mark.parametrize(
    ("type_", "expected"),
    [
        (BUS, {"disableLocalAuth": True, "minimumTlsVersion": "1.2"}),
        ("Microsoft.EventGrid/topics", {"disableLocalAuth": True, "minimumTlsVersionAllowed": "1.2"}),
        (STORAGE, {"allowSharedKeyAccess": False, "allowBlobPublicAccess": False}),
        (f"{BUS}/topics", {"requiresDuplicateDetection": True}),
        (f"{BUS}/queues", {"requiresSession": True, "deadLetteringOnMessageExpiration": True}),
        (f"{BUS}/topics/subscriptions", {"deadLetteringOnMessageExpiration": "deadLetterExpired"}),
        (f"{BUS}/topics/subscriptions/rules", {"sqlFilter": {"sqlExpression": "filter"}}),
    ],
)
def test_no_key_is_accepted_nothing_expires_unseen_and_repeats_are_found(
    type_: str, expected: dict[str, Any]
) -> None:
    assert expected.items() <= properties(type_).items()


def test_the_only_rule_of_a_subscription_is_its_filter() -> None:
    _, _, rule = only(resources(f"{BUS}/topics/subscriptions/rules"))
    assert rule["name"] == "$Default"  # another name would leave the default rule, which matches everything
    assert tree("modules/subscription.bicep")["parameters"]["deadLetterExpired"]["default"] is True


def subscriptions() -> dict[str, dict[str, Any]]:
    """Return the parameters of every subscription, with variables replaced."""
    found = {}
    for file, _, module, given in modules():
        if module == "modules/subscription.bicep":
            values = {name: part["value"] for name, part in tree(file).get("variables", {}).items()}
            filter_ = filled(given.get("filter", "1=1"), values)
            found[filled(given["name"], values)] = {**given, "filter": filter_}
    return found


def filled(text: str, values: dict[str, Any]) -> str:
    """Replace the variables in a text, or return the variable that it names."""
    found = str(values.get(text, text)).replace("\\'", "'")
    return re.sub(r"\$\{(\w+)\}", lambda one: filled(one[1], values), found)


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
    found = subscriptions()
    assert found.keys() == wanted.keys()
    for name, patterns in wanted.items():
        takes: Callable[[Any], bool] = Sql(found[name]["filter"])
        for message in messages:
            is_wanted = any(fnmatch(str(message.subject), f"io.imdsbridge.{one}") for one in patterns)
            assert takes(message) == is_wanted, (name, message.subject)
        assert found[name].get("deadLetterExpired", True) == (name in ("audit", "function")), name


def test_every_role_is_scoped_to_what_it_is_for_and_there_are_no_others() -> None:
    found = set()
    for file, name, config in resources(ROLE):
        loop = tree(file)["resources"][name]["config"].get("loop_type")
        given = config["properties"]
        whom = given["principalId"]
        # Of one that is only known at run time, no name could be made.
        assert whom == loop["detail"]["item_name"] if loop else whom in tree(file)["parameters"]
        role = tree(file)["variables"][given["roleDefinitionId"]]["value"]["function"]
        assert role["type"] == "subscription_resource_id"
        assert role["parameters"]["resource_type"] == "Microsoft.Authorization/roleDefinitions"
        which = role["parameters"]["resource_name_1"]
        where = tree(file)["resources"][config["scope"]]["type"]
        found.add((file, loop["detail"]["array_name"] if loop else whom, which, where))
        # Its name is made of where, whom and which: nobody has a role under two names, and another one has another.
        first, *parts = config["name"]["function"]["parameters"].values()
        assert first["operator"]["operands"] == {"operand_1": config["scope"], "operand_2": "id"}
        assert parts == [whom, given["roleDefinitionId"]], (file, name)
    assert found == ROLES
    own = {
        (file, ".".join(dotted(given["principalId"])))
        for file, _, _, given in modules()
        if "principalId" in given
    }
    assert own == {
        ("modules/logicapp.bicep", "workflow.identity.principalId"),
        ("modules/console.bicep", "identity.properties.principalId"),
        ("modules/function.bicep", "app.identity.principalId"),
    }


def test_forward_may_publish_and_listen_may_publish_and_take_commands() -> None:
    template, parameters = read_parameters(EVERYTHING)  # has an identity for both
    made = [one for one in deploy(template, parameters) if one.type == ROLE]
    found = {
        tuple(part.rpartition("/")[2] for part in one.name.removesuffix(")").split(", ")) for one in made
    }
    forward, listen, approver = (str(number) * 8 for number in (1, 2, 3))
    who = {
        (where, whom[:8], {SENDER: "sends", RECEIVER: "receives"}.get(role)) for where, whom, role in found
    }
    assert {one for one in who if one[0] in ("scheduled-events", "approvals", "receipts")} == {
        *(("scheduled-events", one, "sends") for one in (forward, listen)),
        *(("approvals", one, "receives") for one in (forward, listen)),
        *(("approvals", one, "sends") for one in (approver, "[workflo", "[identit")),
        ("receipts", approver, "receives"),
    }


def test_the_function_and_the_workflow_get_what_their_code_reads() -> None:
    program = (FOLDER.parent / "consumers" / "function" / "function_app.py").read_text()
    read = set(re.findall(r'environ\["(\w+)"\]|"%(\w+)%"', program))
    connection = only(set(re.findall(r'connection="(\w+)"', program)))
    wanted = {name for pair in read for name in pair if name}
    wanted |= {f"{connection}__fullyQualifiedNamespace", "AzureWebJobsStorage__accountName"}
    settings = [one["name"] for one in tree("modules/function.bicep")["variables"]["settings"]["value"]]
    assert sorted(settings) == sorted(wanted)
    # Each deployment replaces all settings, and a Function without this one checks no receipt.
    variables = tree("modules/function.bicep")["variables"]
    values = {"signingSecretUrl": "https://contoso.example/signing"}
    assert evaluate(variables["signingSettings"]["value"], values) == [
        {
            "name": "SIGNING_SECRETS",
            "value": "@Microsoft.KeyVault(SecretUri=https://contoso.example/signing)",
        }
    ]
    assert evaluate(variables["signingSettings"]["value"], {"signingSecretUrl": ""}) == []
    app = properties("Microsoft.Web/sites")["siteConfig"]["appSettings"]
    assert "signingSettings" in app["function"]["parameters"].values()
    assert used_in_main()["function"]["signingSecretUrl"] == "functionSigningSecretUrl"
    definition = (FOLDER.parent / "consumers" / "logicapp" / "definition.json").read_text()
    logic = properties("Microsoft.Logic/workflows")["parameters"]
    connections = logic["'$connections'"]["value"]
    assert {name.strip("'") for name in logic} <= json.loads(definition)["parameters"].keys()
    assert connections.keys() == set(re.findall(r"\['(\w+)'\]\['connectionId'\]", definition))


def used_in_main() -> dict[str, dict[str, Any]]:
    return {name: params for file, name, _, params in modules() if file == "main.bicep"}


def given(file: str, type_: str, **values: Any) -> list[dict[str, Any]]:
    """Return the resources of a type in a file, with the values of expressions."""
    variables = {name: part["value"] for name, part in tree(file).get("variables", {}).items()}
    found: list[dict[str, Any]] = []
    for where, name, config in resources(type_):
        if where == file:
            loop = tree(file)["resources"][name]["config"].get("loop_type")
            node = {"loop_type": loop, "config": config} if loop else config
            value = evaluate(node, {**variables, **values})
            found += value if loop else [value]
    return found


def test_dead_letters_a_topic_that_fills_up_and_throttling_are_alerts() -> None:
    values = {"namespaceName": "contoso", "topicName": "scheduled-events", "topicMegabytes": 5120, "tags": {}}
    values |= {"actionGroupIds": ["/on-call"], "bus": {"id": "/namespaces/contoso"}}
    found = {}
    for one in given("modules/alerts.bicep", "Microsoft.Insights/metricAlerts", **values):
        about = one["properties"]
        rule = only(about["criteria"]["allOf"])
        dimension = only(rule["dimensions"])
        assert (one["location"], about["scopes"]) == ("global", ["/namespaces/contoso"])
        assert about["actions"] == [{"actionGroupId": "/on-call"}]
        assert (rule["metricNamespace"], rule["operator"]) == (BUS, "GreaterThan")
        assert (dimension["name"], dimension["operator"]) == ("EntityName", "Include")
        limit = rule["metricName"], rule["timeAggregation"], rule["threshold"]
        found[one["name"]] = (*limit, *dimension["values"])
    # The names and aggregations are those of Azure Monitor's list of metrics for this type.
    assert found == {
        "contoso-dead-letters": ("DeadletteredMessages", "Maximum", 0, "*"),
        "contoso-topic-size": ("Size", "Maximum", 5120 * 1024 * 1024 // 2, "scheduled-events"),
        "contoso-throttled": ("ThrottledRequests", "Total", 0, "*"),
    }
    # Whoever deploys the template has them.
    assert "condition" not in tree("main.bicep")["modules"]["alerts"]["config"]
    assert used_in_main()["alerts"]["actionGroupIds"] == "actionGroupIds"
    topic = only(given("modules/servicebus.bicep", f"{BUS}/topics", topicName="x", bus={}))
    assert topic["properties"]["maxSizeInMegabytes"] == 5120
    assert tree("modules/servicebus.bicep")["outputs"]["topicMegabytes"]["value"] == "topicMegabytes"


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
    parameters = tree("main.bicep")["parameters"]
    assert parameters["publicNetworkAccess"]["default"] == "Enabled"
    used = used_in_main()
    for name, type_ in (("bus", BUS), ("grid", "Microsoft.EventGrid/topics")):
        # It is written in each deployment: what is not written, Azure may open again.
        assert properties(type_)["publicNetworkAccess"] == "publicNetworkAccess"
        passed = {key: used[name][key] for key in ("publicNetworkAccess", "allowedIpRanges")}
        assert passed == {key: key for key in passed}
    values = {"publicNetworkAccess": "Enabled", "allowedIpRanges": ["203.0.113.0/24"]}
    rule = {"ipMask": "203.0.113.0/24", "action": "Allow"}
    rules = only(given("modules/servicebus.bicep", f"{BUS}/networkRuleSets", **values))
    assert (rules["properties"]["defaultAction"], rules["properties"]["ipRules"]) == ("Deny", [rule])
    topic = only(given("modules/eventgrid.bicep", "Microsoft.EventGrid/topics", **values))
    assert topic["properties"]["inboundIpRules"] == [rule]
    # Without ranges the namespace's rules, perhaps made by hand, are not touched.
    condition = tree("modules/servicebus.bicep")["resources"]["network"]["config"]["condition"]
    assert evaluate(condition, {"allowedIpRanges": []}) is False
    for name, group, target in (("busEndpoint", "namespace", "bus"), ("gridEndpoint", "topic", "grid")):
        wanted = used[name]
        assert (wanted["groupId"], wanted["subnetId"]) == (group, "privateEndpointSubnetId")
        assert re.search(
            rf"targetId: {target}!?\.outputs\.id\n    groupId: '{group}'", (FOLDER / "main.bicep").read_text()
        )
        endpoint_of = {"name": "x", "subnetId": "/subnets/endpoints", "targetId": "/x", "groupId": group}
        file, type_ = "modules/privateendpoint.bicep", "Microsoft.Network/privateEndpoints"
        endpoint = only(given(file, type_, **endpoint_of))
        connection = only(endpoint["properties"]["privateLinkServiceConnections"])
        assert connection["properties"]["groupIds"] == [group]
        assert endpoint["properties"]["subnet"] == {"id": "/subnets/endpoints"}
    zones = [used[name]["dnsZoneId"] for name in ("busEndpoint", "gridEndpoint")]
    assert zones == ["serviceBusDnsZoneId", "eventGridDnsZoneId"]


def test_logs_and_metrics_of_everything_go_to_the_workspace() -> None:
    for name, params in used_in_main().items():
        module = tree("main.bicep")["modules"][name]["detail"]["path"]
        if "workspaceId" in tree(module)["parameters"]:
            assert params["workspaceId"] == "workspaceId", name
    logged = {
        (file, config["scope"])
        for file, _, config in resources("Microsoft.Insights/diagnosticSettings")
        if config["properties"]["workspaceId"] == "workspaceId"
    }
    assert logged == {
        ("modules/servicebus.bicep", "bus"),
        ("modules/eventgrid.bicep", "topic"),
        ("modules/logicapp.bicep", "workflow"),
        ("modules/console.bicep", "managedEnvironment"),
    }


@pytest.mark.parametrize("own", ["", "/subnets/mine"])
def test_the_storage_of_the_function_is_open_to_its_subnet_only(own: str) -> None:
    module = "modules/function.bicep"
    values = {"subnetId": own, "storageAllowedIpRanges": [], "network": {"id": "/networks/audit"}}
    subnet = own or "/networks/audit/subnets/function"
    rules = only(given(module, STORAGE, **values))["properties"]["networkAcls"]
    opened = [{"id": subnet, "action": "Allow"}]
    assert (rules["defaultAction"], rules["virtualNetworkRules"], rules["ipRules"]) == ("Deny", opened, [])
    variables = {name: part["value"] for name, part in tree(module)["variables"].items()}
    app = evaluate(properties("Microsoft.Web/sites")["virtualNetworkSubnetId"], {**variables, **values})
    assert app == subnet  # so that the app itself reaches it
    condition = tree(module)["resources"]["network"]["config"]["condition"]
    assert evaluate(condition, values) is (own == "")
    network = only(given(module, "Microsoft.Network/virtualNetworks", **values))
    made = only(network["properties"]["subnets"])
    assert made["name"] == "function"
    delegated = [one["properties"]["serviceName"] for one in made["properties"]["delegations"]]
    assert delegated == ["Microsoft.App/environments"]  # of Flex Consumption
    assert made["properties"]["serviceEndpoints"] == [{"service": "Microsoft.Storage"}]
    for name in ("subnetId", "storageAllowedIpRanges"):
        parameter = f"function{name[0].upper()}{name[1:]}"
        assert used_in_main()["function"][name] == parameter
        assert not tree("main.bicep")["parameters"][parameter]["default"]


def test_the_readme_names_every_parameter_about_networks_and_alerts() -> None:
    names = [
        name
        for name in tree("main.bicep")["parameters"]
        if re.search("(?i)subnet|dns|public|ranges|action", name)
    ]
    assert len(names) == 9
    assert [name for name in names if not re.search(rf"[`\"]{name}[`\"]", README)] == []


def test_the_readme_names_required_parameters_and_the_entities_that_are_deployed() -> None:
    needed = required("main.bicep") | required("modules/scaleset.bicep")
    assert [name for name in needed if not re.search(rf"\b{name}\b", README)] == []
    parameters = tree("main.bicep")["parameters"]
    named = {
        key: set(re.findall(rf'\b(?:receipts_)?{key} = "(.*?)"', README))
        for key in ("topic", "queue", "subscription")
    }
    assert named == {
        "topic": {parameters["topicName"]["default"]},
        "queue": {parameters["queueName"]["default"]},
        "subscription": {"relay", "receipts"},
    }
