"""The Bicep files: each parses, refers to existing names, and creates what imds-bridge needs. Nothing is deployed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatch
from functools import cache
from typing import Any

import pytest

from bridge.formats.samples import samples
from bridge.lab.servicebus.filters import Sql
from bridge.sinks.servicebus import to_message
from tests.support.bicep import FILES, FOLDER, body, properties, resources, tree

README = (FOLDER / "README.md").read_text()

KEYWORDS = {"true", "false", "null", "if", "for", "in", "existing"}
BUS = "Microsoft.ServiceBus/namespaces"
APP = "Microsoft.App/containerApps"
ROLE = "Microsoft.Authorization/roleAssignments"
SENDER = "69a216fc-b8fb-44d8-bc22-1f3c2cd27a39"  # Azure Service Bus Data Sender
RECEIVER = "4f6d3b9b-027b-4f4c-9142-0e5a2a2247e0"  # Azure Service Bus Data Receiver
GRID_SENDER = "d5a91429-5739-47e2-a06b-3470a27159e7"  # EventGrid Data Sender
BLOB_OWNER = "b7e6dc6d-f1e8-4753-8033-0f276bb0955b"  # Storage Blob Data Owner
TABLE_CONTRIBUTOR = "0a9a7e1f-b9d0-4cc4-a60d-0319b160aaa3"  # Storage Table Data Contributor
METRICS_PUBLISHER = "3913510d-42f4-4e42-8a64-420c390055eb"  # Monitoring Metrics Publisher

# Each version, and every property in the files, was looked up in Azure/bicep-types-az.
LOOKED_UP = {
    ROLE: "2022-04-01",
    APP: "2025-01-01",
    f"{APP}/authConfigs": "2025-01-01",
    "Microsoft.App/managedEnvironments": "2025-01-01",
    "Microsoft.Compute/virtualMachineScaleSets": "2024-11-01",
    "Microsoft.EventGrid/topics": "2025-02-15",
    "Microsoft.Insights/components": "2020-02-02",
    "Microsoft.Insights/diagnosticSettings": "2021-05-01-preview",
    "Microsoft.Logic/workflows": "2019-05-01",
    "Microsoft.ManagedIdentity/userAssignedIdentities": "2023-01-31",
    BUS: "2024-01-01",
    f"{BUS}/queues": "2024-01-01",
    f"{BUS}/topics": "2024-01-01",
    f"{BUS}/topics/subscriptions": "2024-01-01",
    f"{BUS}/topics/subscriptions/rules": "2024-01-01",
    "Microsoft.Storage/storageAccounts": "2024-01-01",
    "Microsoft.Storage/storageAccounts/blobServices": "2024-01-01",
    "Microsoft.Storage/storageAccounts/blobServices/containers": "2024-01-01",
    "Microsoft.Web/connections": "2016-06-01",
    "Microsoft.Web/serverfarms": "2024-04-01",
    "Microsoft.Web/sites": "2024-04-01",
}

# The role assignments: the principal ids, the role, and its scope.
ROLES = {
    ("modules/servicebus.bicep", "publisherIds", SENDER, f"{BUS}/topics"),
    ("modules/servicebus.bicep", "listenerIds", RECEIVER, f"{BUS}/queues"),
    ("modules/servicebus.bicep", "approverIds", SENDER, f"{BUS}/queues"),
    ("modules/subscription.bicep", "receiverIds", RECEIVER, f"{BUS}/topics/subscriptions"),
    ("modules/eventgrid.bicep", "publisherIds", GRID_SENDER, "Microsoft.EventGrid/topics"),
    ("modules/logicapp.bicep", "workflow", SENDER, f"{BUS}/queues"),
    ("modules/console.bicep", "identity", SENDER, f"{BUS}/queues"),
    ("modules/function.bicep", "app", BLOB_OWNER, "Microsoft.Storage/storageAccounts"),
    ("modules/function.bicep", "app", TABLE_CONTRIBUTOR, "Microsoft.Storage/storageAccounts"),
    ("modules/function.bicep", "app", METRICS_PUBLISHER, "Microsoft.Insights/components"),
}


def decorators(file: str, parameter: str) -> dict[str, Any]:
    return {one["type"]: one.get("argument") for one in tree(file)["parameters"][parameter]["decorators"]}


def required(file: str) -> set[str]:
    """Return the parameters without a default; none of the files has one that is null."""
    return {name for name, parameter in tree(file)["parameters"].items() if parameter["default"] is None}


def duration(text: str) -> timedelta:
    """Read the ISO 8601 durations that the files use."""
    matched = re.fullmatch(r"P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+)S)?)?", text)
    assert matched, text
    days, hours, minutes, seconds = (int(number or 0) for number in matched.groups())
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)


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


# --- names and references ---


@pytest.mark.parametrize("file", FILES)
def test_a_file_uses_what_is_declared_and_looked_up_and_hands_out_no_key(file: str) -> None:
    parsed, raw, text = tree(file), (FOLDER / file).read_text(), code(file)
    assert parsed.get("resources") or parsed.get("modules")
    declared = {name: kind for kind, name in re.findall(r"(?m)^(param|var|resource|module) (\w+)", text)}
    local = set(re.findall(r"\bfor (\w+) in", text)) | set(re.findall(r"(\w+) =>", text))
    used = names_used(text)
    assert used <= declared.keys() | local
    assert {name for name, kind in declared.items() if kind in ("param", "var")} <= used
    for resource in parsed.get("resources", {}).values():
        assert LOOKED_UP[resource["type"]] == resource["api_version"]
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
    alone = {"main.bicep", "modules/scaleset.bicep"}
    assert {module for _, _, module, _ in used} | alone == set(FILES)


def test_the_example_parameters_are_parameters_and_give_all_that_have_no_default() -> None:
    given = json.loads((FOLDER / "example.parameters.json").read_text())["parameters"]
    assert given.keys() <= tree("main.bicep")["parameters"].keys()
    assert required("main.bicep") <= given.keys()


# --- properties ---


@pytest.mark.parametrize(
    ("type_", "expected"),
    [
        (BUS, {"disableLocalAuth": True, "minimumTlsVersion": "1.2"}),
        (f"{BUS}/topics", {"requiresDuplicateDetection": True}),
        (
            f"{BUS}/queues",
            {"requiresSession": True, "deadLetteringOnMessageExpiration": True, "maxDeliveryCount": 10},
        ),
        (
            f"{BUS}/topics/subscriptions",
            {
                "deadLetteringOnFilterEvaluationExceptions": True,
                "deadLetteringOnMessageExpiration": "deadLetterExpired",
            },
        ),
        (
            f"{BUS}/topics/subscriptions/rules",
            {"filterType": "SqlFilter", "sqlFilter": {"sqlExpression": "filter"}},
        ),
        (
            "Microsoft.EventGrid/topics",
            {
                "inputSchema": "CloudEventSchemaV1_0",
                "disableLocalAuth": True,
                "minimumTlsVersionAllowed": "1.2",
            },
        ),
        (
            "Microsoft.Storage/storageAccounts",
            {"allowSharedKeyAccess": False, "allowBlobPublicAccess": False},
        ),
    ],
)
def test_a_resource_is_made_as_imds_bridge_needs_it(type_: str, expected: dict[str, Any]) -> None:
    assert expected.items() <= properties(type_).items()


@pytest.mark.parametrize(
    ("type_", "name", "least", "most"),
    [
        (
            f"{BUS}/topics",
            "duplicateDetectionHistoryTimeWindow",
            "PT2H",
            "P7D",
        ),  # a VM may be cut off that long
        (f"{BUS}/topics", "defaultMessageTimeToLive", "P7D", "P365D"),
        (f"{BUS}/queues", "lockDuration", "PT1M", "PT5M"),
        (f"{BUS}/queues", "defaultMessageTimeToLive", "PT15M", "P1D"),
    ],
)
def test_a_time_is_neither_too_short_nor_too_long(type_: str, name: str, least: str, most: str) -> None:
    assert duration(least) <= duration(properties(type_)[name]) <= duration(most)


def test_the_only_rule_of_a_subscription_is_its_filter() -> None:
    [(_, _, rule)] = resources(f"{BUS}/topics/subscriptions/rules")
    assert rule["name"] == "$Default"  # another name would leave the default rule, which matches everything
    assert tree("modules/subscription.bicep")["parameters"]["deadLetterExpired"]["default"] is True
    assert decorators("main.bicep", "sku")["allowed"] == ["Standard", "Premium"]  # Basic has no topics


@cache
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


@pytest.mark.parametrize(
    ("name", "patterns"),
    [
        ("audit", ["*"]),
        ("function", ["*"]),
        ("console", ["*"]),
        ("relay", ["scheduledevent.*", "approval.*"]),
        ("receipts", ["approval.*"]),
        ("logicapp", ["scheduledevent.scheduled.v1"]),
    ],
)
def test_a_subscription_receives_the_events_that_it_is_for(name: str, patterns: list[str]) -> None:
    wanted: Callable[[Any], bool] = Sql(subscriptions()[name]["filter"])
    messages = [to_message(event) for event in samples(datetime(2026, 11, 20, tzinfo=UTC))]
    taken = {message.subject for message in messages if wanted(message)}
    assert taken == {
        message.subject
        for message in messages
        if any(fnmatch(str(message.subject), f"io.imdsbridge.{pattern}") for pattern in patterns)
    }


def test_every_subscription_is_looked_at_here_and_what_records_is_kept_beyond_its_time() -> None:
    kept = {name: given.get("deadLetterExpired", True) for name, given in subscriptions().items()}
    assert {name for name, is_kept in kept.items() if is_kept} == {"audit", "function"}
    assert {name for name, is_kept in kept.items() if not is_kept} == {
        "console",
        "relay",
        "receipts",
        "logicapp",
    }


# --- role assignments ---


def owner(value: Any) -> str:
    """Return the object whose property a value is; a name is returned as it is."""
    return str(value["operator"]["operands"]["operand_1"] if isinstance(value, dict) else value)


def test_every_role_is_scoped_to_what_it_is_for_and_there_are_no_others() -> None:
    found = set()
    for file, name, config in resources(ROLE):
        loop = tree(file)["resources"][name]["config"].get("loop_type")
        given = config["properties"]
        whom = owner(given["principalId"])
        assert not loop or whom == loop["detail"]["item_name"]
        role = tree(file)["variables"][given["roleDefinitionId"]]["value"]["function"]
        assert role["type"] == "subscription_resource_id"
        assert role["parameters"]["resource_type"] == "Microsoft.Authorization/roleDefinitions"
        which = role["parameters"]["resource_name_1"]
        where = tree(file)["resources"][config["scope"]]["type"]
        found.add((file, loop["detail"]["array_name"] if loop else whom, which, where))
    assert found == ROLES


def test_the_name_of_a_role_assignment_is_made_of_where_whom_and_which() -> None:
    for file, name, config in resources(ROLE):
        parts = [owner(part) for part in config["name"]["function"]["parameters"].values()]
        given = config["properties"]
        expected = [config["scope"], owner(given["principalId"]), given["roleDefinitionId"]]
        assert config["name"]["function"]["type"] == "guid"
        assert parts == expected, (file, name)
        assert given["principalType"] in ("ServicePrincipal", "approverType", "receiverType")


def test_forward_may_publish_and_listen_may_publish_and_take_commands() -> None:
    union = tree("main.bicep")["variables"]["publisherIds"]["value"]["function"]
    assert union["type"] == "union"  # an identity in both gets the role once
    assert sorted(union["parameters"].values()) == ["forwardPrincipalIds", "listenPrincipalIds"]
    given = {name: params for file, name, _, params in modules() if file == "main.bicep"}
    assert given["bus"]["publisherIds"] == given["grid"]["publisherIds"] == "publisherIds"
    assert given["bus"]["listenerIds"] == "listenPrincipalIds"
    assert given["bus"]["approverIds"] == given["receiptsRead"]["receiverIds"] == "approverPrincipalIds"


# --- the rest ---


def test_logs_go_to_the_workspace_if_there_is_one() -> None:
    for file, name, config in resources("Microsoft.Insights/diagnosticSettings"):
        assert config["properties"]["workspaceId"] == "workspaceId"
        assert config["properties"]["logs"] == [{"categoryGroup": "allLogs", "enabled": True}]
        assert "condition" in tree(file)["resources"][name]["config"]


def test_the_function_gets_every_setting_that_it_reads() -> None:
    program = (FOLDER.parent / "consumers" / "function" / "function_app.py").read_text()
    read = set(re.findall(r'environ\["(\w+)"\]|"%(\w+)%"', program))
    [connection] = set(re.findall(r'connection="(\w+)"', program))
    wanted = {name for pair in read for name in pair if name}
    wanted |= {f"{connection}__fullyQualifiedNamespace", "AzureWebJobsStorage__accountName"}
    given = [one["name"] for one in tree("modules/function.bicep")["variables"]["settings"]["value"]]
    assert sorted(given) == sorted(wanted)


def test_the_workflow_gets_the_connections_and_parameters_that_its_definition_has() -> None:
    definition = (FOLDER.parent / "consumers" / "logicapp" / "definition.json").read_text()
    given = properties("Microsoft.Logic/workflows")["parameters"]
    connections = given["'$connections'"]["value"]
    assert {name.strip("'") for name in given} <= json.loads(definition)["parameters"].keys()
    assert connections.keys() == set(re.findall(r"\['(\w+)'\]\['connectionId'\]", definition))


def test_a_scale_set_announces_deletions_5_to_15_minutes_ahead_and_images_15() -> None:
    model = properties("Microsoft.Compute/virtualMachineScaleSets")["virtualMachineProfile"]
    assert model["scheduledEventsProfile"] == {
        "terminateNotificationProfile": {"enable": True, "notBeforeTimeout": "PT${terminateNoticeMinutes}M"},
        "osImageNotificationProfile": {"enable": "osImageNotice", "notBeforeTimeout": "PT15M"},
    }
    limits = decorators("modules/scaleset.bicep", "terminateNoticeMinutes")
    assert (limits["min_value"], limits["max_value"]) == (5, 15)
    assert 5 <= tree("modules/scaleset.bicep")["parameters"]["terminateNoticeMinutes"]["default"] <= 15


# --- README.md ---


def test_the_readme_names_the_files_that_there_are_and_every_parameter_without_a_default() -> None:
    named = set(re.findall(r"\b((?:modules/)?\w+\.bicep)\b", README))
    assert "main.bicep" in named
    assert named <= set(FILES)
    needed = required("main.bicep") | required("modules/scaleset.bicep")
    assert [name for name in needed if not re.search(rf"\b{name}\b", README)] == []


def test_the_configurations_name_the_entities_that_are_deployed() -> None:
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
