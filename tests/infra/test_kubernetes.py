"""The Kubernetes manifests: valid by Kubernetes' schemas, with few rights, and configurations that can be loaded."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from bridge.config.console import ProxySettings
from bridge.config.loader import load
from bridge.config.models import Config, MetricsSettings
from bridge.console.process import STOP_SECONDS
from bridge.lab.httpd import Answer, HttpRequest, Server, json_answer
from bridge.process.process import LAST_SECONDS
from infra.kubernetes.generate import README, SCHEMA, schema, table, with_table
from tests.support.kubernetes import merge
from tests.support.only import only
from tests.support.paths import ROOT
from tests.support.process import completed
from tests.support.programs import tool

FOLDER = ROOT / "infra" / "kubernetes"
CONSOLE = FOLDER / "console"
NO_MANIFESTS = {"kustomization.yaml", "Chart.yaml", "values.yaml", "rules.yaml"}
MANIFESTS = sorted(path.name for path in FOLDER.glob("*.yaml") if path.name not in NO_MANIFESTS)
THE_CONSOLE = "console/console.yaml"
OF_THE_CONSOLE = ["console/namespace.yaml", THE_CONSOLE]
ROLES = ["forward", "listen"]
KUBERNETES_VERSIONS = ["1.31.0", "1.34.0", "1.37.0"]


def documents(name: str) -> list[dict[str, Any]]:
    """Return the documents of a file, in which no two parts are the same object."""
    found = yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8"))
    return [json.loads(json.dumps(one)) for one in found]


def pod(file: str) -> dict[str, Any]:
    """Return the specification of the pods of a file."""
    workload = only(one for one in documents(file) if one["kind"] in ("DaemonSet", "Deployment"))
    return dict(workload["spec"]["template"]["spec"])


def container(file: str, name: str) -> dict[str, Any]:
    return only(one for one in pod(file)["containers"] if one["name"] == name)


def assert_valid(objects: Iterable[dict[str, Any]]) -> None:
    """Check objects by the strict schemas of several versions of Kubernetes."""
    for one, version in product(objects, KUBERNETES_VERSIONS):
        kubernetes_validate.validate(one, version, strict=True)


def test_every_manifest_is_valid_by_the_strict_schemas_of_kubernetes() -> None:
    assert_valid(one for name in (*MANIFESTS, *OF_THE_CONSOLE) for one in documents(name))


def test_the_kustomization_names_every_manifest_those_that_approve_as_a_choice() -> None:
    text = (FOLDER / "kustomization.yaml").read_text(encoding="utf-8")
    choices = {"listen.yaml", "drain.yaml", "relay.yaml"}
    before = {"check.yaml"}
    assert {*only(documents("kustomization.yaml"))["resources"]} == {*MANIFESTS} - choices - before
    assert [name for name in choices if f"# - {name} #" not in text] == []


@pytest.mark.parametrize("role", [*ROLES, "drain", "relay"])
def test_the_configuration_of_a_process_is_valid_also_with_all_that_it_suggests(
    role: str, tmp_path: Path
) -> None:
    text = (FOLDER / f"{role}.toml").read_text(encoding="utf-8")
    head, _, rest = text.partition("\n")
    assert head.startswith("# ")
    suggested = rest.replace("\n# ", "\n")
    (tmp_path / "teams-url").write_text("https://example.org/hook")
    (tmp_path / "all.toml").write_text(suggested.replace("/run/secrets/imds-bridge", str(tmp_path)))
    everything = load(tmp_path / "all.toml", {})
    assert {*everything.sinks} == {*tomllib.loads(suggested)["sinks"]}
    assert everything.relay if role == "relay" else everything.approvals
    # the two of drain.yaml cannot have the same port
    assert bool(everything.metrics.listen) == (role != "drain")


@pytest.mark.parametrize(("role", "address"), [("forward", "127.0.0.1:9464"), ("listen", "127.0.0.1:9465")])
def test_each_process_loads_its_own_configuration_with_a_port_of_its_own(role: str, address: str) -> None:
    everything = yaml.safe_load((FOLDER / "kustomization.yaml").read_text().replace("  # ", "  "))
    files = {one["name"]: one["files"] for one in everything["configMapGenerator"]}
    mounted = only(one["configMap"]["name"] for one in pod(f"{role}.yaml")["volumes"] if "configMap" in one)
    assert files[mounted] == [f"config.toml={role}.toml"]
    assert re.findall(r'^# listen = "(\S+)"', (FOLDER / f"{role}.toml").read_text(), re.M) == [address]


def assert_few_rights(spec: dict[str, Any], names: list[str]) -> None:
    """Check that a pod is not root, has no right in the cluster, and writes only where something is mounted."""
    objects = [one for name in names for one in documents(name)]
    assert not [one["kind"] for one in objects if "Role" in one["kind"]]
    accounts = [one["metadata"]["name"] for one in objects if one["kind"] == "ServiceAccount"]
    assert spec["serviceAccountName"] in accounts
    assert (spec["automountServiceAccountToken"], spec["securityContext"]["runAsNonRoot"]) == (False, True)
    for one in spec["containers"]:
        security = one["securityContext"]
        assert (security["readOnlyRootFilesystem"], security["allowPrivilegeEscalation"]) == (True, False)
        assert security["capabilities"] == {"drop": ["ALL"]}


def test_a_pod_reaches_imds_is_not_root_has_no_right_in_the_cluster_and_writes_only_its_own_state() -> None:
    spec, one = pod("forward.yaml"), container("forward.yaml", "forward")
    assert_few_rights(spec, [name for name in MANIFESTS if name != "drain.yaml"])
    assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    mounts = {mount["name"]: mount for mount in one["volumeMounts"]}
    assert [name for name, mount in mounts.items() if not mount.get("readOnly")] == ["state", "tmp"]
    state = only(volume for volume in spec["volumes"] if volume["name"] == "state")
    assert state["hostPath"]["path"] == mounts["state"]["mountPath"] == f"{Config().state_dir}/forward"
    first, user = only(spec["initContainers"]), spec["securityContext"]
    # also what an earlier image with another user left, in folders of mode 0700
    assert first["command"] == ["chown", "-R", f"{user['runAsUser']}:{user['runAsGroup']}", "/state"]
    assert first["securityContext"]["capabilities"]["add"] == ["CHOWN", "DAC_READ_SEARCH"]
    assert one["args"] == ["forward", "--config", "/etc/imds-bridge/config.toml"]
    assert one["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert one["livenessProbe"]["terminationGracePeriodSeconds"] == 5
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        command = one[probe]["exec"]["command"]
        assert command[:4] == ["python", "/opt/imds-bridge/health.py", "--role", "forward"]
    assert "--ready" not in one["livenessProbe"]["exec"]["command"]
    assert spec["terminationGracePeriodSeconds"] > Config().stop_seconds + LAST_SECONDS


def test_the_two_daemon_sets_differ_only_in_their_role() -> None:
    texts = [(FOLDER / f"{role}.yaml").read_text(encoding="utf-8").replace(role, "ROLE") for role in ROLES]
    lines = [[line for line in text.splitlines() if "readinessProbe" not in line] for text in texts]
    assert lines[0] == lines[1]


def test_the_drain_is_both_processes_in_one_pod_with_a_token_and_the_name_of_its_node() -> None:
    account, _, binding, daemon_set = documents("drain.yaml")
    spec = daemon_set["spec"]["template"]["spec"]
    name = account["metadata"]["name"]
    assert (spec["serviceAccountName"], binding["roleRef"]["name"]) == (name, name)
    assert [(one["name"], one["namespace"]) for one in binding["subjects"]] == [(name, "imds-bridge")]
    node = [{"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]
    containers = []
    for role in ROLES:
        state, *mounts = container(f"{role}.yaml", role)["volumeMounts"]
        state = {**state, "mountPath": str(Config().state_dir)}
        env = {"env": node} if role == "listen" else {}
        containers.append({**container(f"{role}.yaml", role), **env, "volumeMounts": [state, *mounts]})
    volumes = yaml.safe_load(yaml.safe_dump(pod("forward.yaml")["volumes"]).replace("forward", "drain"))
    own = {"serviceAccountName": name, "automountServiceAccountToken": True}
    assert spec == {**pod("forward.yaml"), **own, "containers": containers, "volumes": volumes}


# The chart.


def helm(*arguments: str, values: Mapping[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    return completed(tool("helm"), *arguments, "--values", "-", cwd=FOLDER, given=json.dumps(values or {}))


def rendered(release: str = "imds-bridge", /, *options: str, **values: Any) -> dict[str, dict[str, Any]]:
    """Return what the chart makes of values, by kind and name, without its hooks."""
    return with_hooks(release, "--no-hooks", *options, **values)


def with_hooks(release: str, /, *options: str, **values: Any) -> dict[str, dict[str, Any]]:
    """Return what the chart makes of values, by kind and name."""
    done = helm("template", release, ".", "--namespace", "imds-bridge", *options, values=values)
    assert done.returncode == 0, done.stderr
    found = [one for one in yaml.safe_load_all(done.stdout) if one]
    return {f"{one['kind']} {one['metadata']['name']}": one for one in found}


def checks(**values: Any) -> dict[str, dict[str, Any]]:
    """Return the pod templates of the Jobs that check configurations before an upgrade, by role."""
    found = with_hooks("web", **values).items()
    return {
        key.removeprefix("Job web-").rpartition("-check-")[0]: one["spec"]["template"]["spec"]
        for key, one in found
        if key.startswith("Job ")
    }


def test_a_job_tries_every_configuration_in_the_pod_of_its_role_before_anything_changes() -> None:
    values = everything(
        env=[{"name": "IMDS_BRIDGE__LOG__LEVEL", "value": "DEBUG"}],
        volumes=[{"name": "tools", "emptyDir": {}}],
        volumeMounts=[{"name": "tools", "mountPath": "/tools"}],
    )
    got = with_hooks("web", **values)
    assert_valid(one for key, one in got.items() if key.startswith("Job "))
    found = checks(**values)
    assert {*found} == {"forward", "listen", "drain", "relay"}
    for role, pod in found.items():
        names = ["forward", "listen"] if role == "drain" else [role]
        told = [one["args"] for one in pod["containers"]]
        check = ["imds-bridge", "config", "check", "--role"]
        assert told == [[*check, name, "/etc/imds-bridge/config.toml"] for name in names]
        real = workload(got, role)["template"]["spec"]
        for one, other in zip(pod["containers"], real["containers"], strict=True):
            assert {*other} - {*one} <= {"startupProbe", "livenessProbe", "readinessProbe"}
            assert (one["env"], one["volumeMounts"]) == (other["env"], other["volumeMounts"])
        assert {"state": {}, "tools": {}}.items() <= {
            one["name"]: one["emptyDir"] for one in pod["volumes"] if "emptyDir" in one
        }.items()
        assert (pod["restartPolicy"], pod["automountServiceAccountToken"]) == ("Never", False)
        assert not {"serviceAccountName", "hostNetwork", "initContainers"} & {*pod}
    for name in (one for one in got if "-check-" in one):
        about = got[name]["metadata"]
        assert about["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
        if name.startswith("Job "):
            mounted = {one["name"]: one for one in got[name]["spec"]["template"]["spec"]["volumes"]}
            assert mounted["config"]["configMap"]["name"] == about["name"]
            config = got[f"ConfigMap {about['name']}"]
            assert config["metadata"]["annotations"]["helm.sh/hook-weight"] == "-1"
            role = re.split("-", about["name"])[1]
            assert config["data"] == config_map(got, f"web-{role}")["data"]


def test_the_check_to_apply_before_a_kustomization_is_the_job_of_the_chart() -> None:
    (job,) = documents("check.yaml")
    (of_chart,) = (one for key, one in with_hooks("imds-bridge").items() if key.startswith("Job "))
    expected = of_chart["spec"]
    del expected["template"]["metadata"]
    one = only(expected["template"]["spec"]["containers"])
    one["command"] = one.pop("args")
    volume = only(each for each in expected["template"]["spec"]["volumes"] if "configMap" in each)
    volume["configMap"]["name"] = "imds-bridge-check"
    assert job["spec"] == expected
    commands = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert "create configmap imds-bridge-check --from-file=config.toml=forward.toml" in commands


def test_the_check_reads_the_map_that_exists_and_the_file_that_arguments_name_and_can_be_turned_off() -> None:
    forward: dict[str, Any] = {"existingConfigMap": "mine"}
    pod = checks(forward=forward)["forward"]
    assert {"name": "mine"} in [one.get("configMap") for one in pod["volumes"]]
    for words in (["--config", "/x.toml"], ["--config=/x.toml"]):
        one = only(checks(forward={"extraArgs": words})["forward"]["containers"])
        assert one["args"][-1] == "/x.toml"
    assert checks(checkConfig={"enabled": False}) == {}


def test_a_process_reads_the_mounted_file_and_no_defaults_unless_arguments_name_another() -> None:
    for words, expected in (
        ([], ["--config", "/etc/imds-bridge/config.toml"]),
        (["--config=/x"], ["--config=/x"]),
    ):
        pod = workload(rendered("web", forward={"extraArgs": words}), "forward")["template"]["spec"]
        assert only(pod["containers"])["args"] == ["forward", *expected]


def test_a_check_that_fails_gives_the_exit_code_and_says_what_to_do(tmp_path: Path) -> None:
    command = only(checks()["forward"]["containers"])["command"]
    for code in (0, 2):
        fake = tmp_path / "imds-bridge"
        fake.write_text(f'#!/bin/sh\necho "$@"\nexit {code}\n')
        fake.chmod(0o755)
        done = subprocess.run(
            [*command, "imds-bridge", "config"],
            capture_output=True,
            check=False,
            text=True,
            env={"PATH": f"{tmp_path}:/bin"},
        )
        assert (done.returncode, done.stdout) == (code, "config\n")
        assert ("checkConfig.enabled=false" in done.stderr) == bool(code)


def refused(**values: Any) -> str:
    """Return why the chart does not take values."""
    done = helm("template", "imds-bridge", ".", values=values)
    assert done.returncode != 0, done.stdout
    return done.stderr


APART = {role: {"nodeSelector": {"pool": role}} for role in (*ROLES, "drain")}  # no node has two of them


def everything(**more: Any) -> dict[str, Any]:
    """Return values that enable each role, with more of each."""
    return {role: {"enabled": True, **more, **APART.get(role, {})} for role in (*ROLES, "drain", "relay")}


def workload(got: dict[str, dict[str, Any]], role: str, release: str = "web") -> dict[str, Any]:
    """Return the specification of what runs a role of a release."""
    kind = "Deployment" if role == "relay" else "DaemonSet"
    return dict(got[f"{kind} {release}-{role}"]["spec"])


def config_map(got: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the only ConfigMap of a role, which is immutable, has a hash in its name, and stays."""
    found = only(one for key, one in got.items() if re.fullmatch(f"ConfigMap {name}-[0-9a-f]{{10}}", key))
    assert found["immutable"] is True
    assert found["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    workload = only(one for key, one in got.items() if re.fullmatch(f"(DaemonSet|Deployment) {name}", key))
    volumes = workload["spec"]["template"]["spec"]["volumes"]
    mounted = only(one["configMap"]["name"] for one in volumes if one["name"] == "config")
    assert mounted == found["metadata"]["name"]
    return found


@pytest.mark.parametrize(
    ("release", "namespace", "roles"),
    [
        ("imds-bridge", "imds-bridge", ["forward"]),
        ("web", "shop", ["listen", "relay"]),
        ("web", "shop", ["drain"]),
    ],
)
def test_the_chart_applies_the_manifests_of_what_is_enabled_under_names_of_the_release(
    release: str, namespace: str, roles: list[str]
) -> None:
    enabled: dict[str, Any] = {role: {"enabled": role in roles} for role in (*ROLES, "drain", "relay")}
    assert helm("lint", ".", "--strict", values=enabled).returncode == 0
    got = rendered(release, "--namespace", namespace, **enabled)
    labels = {"app.kubernetes.io/instance": release}
    pods = {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}}}
    for role in roles:
        plain, name = f"imds-bridge-{role}", f"{release}-{role}"
        config = config_map(got, name)
        assert config["data"]["config.toml"] == (FOLDER / f"{role}.toml").read_text().replace(plain, name)
        del got[f"ConfigMap {config['metadata']['name']}"]
        changes = {
            '"image": "imds-bridge"': '"image": "registry.example.org/imds-bridge:0.1.0"',
            f'"configMap": {{"name": "{plain}"': f'"configMap": {{"name": "{config["metadata"]["name"]}"',
            plain: name,
        }
        for one in (*documents("serviceaccounts.yaml"), *documents(f"{role}.yaml")):
            if one["metadata"]["name"] != plain:
                continue
            text = json.dumps(one)
            for before, after in changes.items():
                text = text.replace(before, after)
            expected, of_cluster = json.loads(text), {"name": f"{namespace}-{name}"}
            kind, about = expected["kind"], expected["metadata"]
            merge(about, {"labels": {**labels, "app.kubernetes.io/part-of": "imds-bridge"}})
            merge(about, of_cluster if kind.startswith("ClusterRole") else {"namespace": namespace})
            merge(expected, {"spec": pods} if kind in ("DaemonSet", "Deployment") else {})
            if kind == "ClusterRoleBinding":
                merge(expected, {"roleRef": of_cluster})
                expected["subjects"][0]["namespace"] = namespace
            assert got.pop(f"{kind} {about['name']}") == expected
    assert not got


def test_values_of_the_chart_set_the_image_the_configuration_and_parts_of_manifests() -> None:
    patch = {"ServiceAccount": {"metadata": {"labels": {"a": "b"}}}, "ConfigMap": {"data": {"more": ""}}}
    names = [config_map(rendered(), "imds-bridge-forward")["metadata"]["name"]]
    got = rendered(image={"repository": "contoso.azurecr.io/x", "tag": "7"}, forward={"config": "# mine"})
    template = got["DaemonSet imds-bridge-forward"]["spec"]["template"]
    assert {one["image"] for one in template["spec"]["containers"]} == {"contoso.azurecr.io/x:7"}
    one = config_map(got, "imds-bridge-forward")
    assert one["data"] == {"config.toml": "# mine"}
    names.append(one["metadata"]["name"])
    got = rendered(forward={"config": "# mine", "patch": patch})
    names.append(config_map(got, "imds-bridge-forward")["metadata"]["name"])
    assert len({*names}) == 3  # each content has a name of its own
    assert got["ServiceAccount imds-bridge-forward"]["metadata"]["labels"]["a"] == "b"


def test_values_change_each_pod_and_keep_what_the_manifest_has() -> None:
    limits = {"limits": {"memory": "256Mi"}, "requests": {"cpu": "50m"}}
    values = everything(
        resources=limits,
        env=[{"name": "SSL_CERT_FILE", "value": "/etc/our/ca.pem"}],
        volumes=[{"name": "certificates", "configMap": {"name": "our-authority"}}],
        volumeMounts=[{"name": "certificates", "mountPath": "/etc/our", "readOnly": True}],
        extraArgs=["--config", "/etc/our/config.toml"],
        existingConfigMap="our-config",
        existingSecret="our-secret",
        tolerations=[{"key": "pool", "operator": "Exists"}],
        affinity={"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        priorityClassName="our-class",
        podAnnotations={"note": "a"},
        podLabels={"azure.workload.identity/use": "true"},
        serviceAccount={"name": "our-account", "annotations": {"azure.workload.identity/client-id": "0-0"}},
    )
    for role in ("listen", "drain"):
        values[role] |= {"dryRun": True, "updateStrategy": {"type": "OnDelete"}}
    got = rendered(
        "web",
        image={"digest": f"sha256:{'0' * 64}", "tag": "7", "pullPolicy": "Always"},
        imagePullSecrets=[{"name": "registry"}],
        nameOverride="events",
        commonLabels={"team": "a"},
        prometheusRule={"enabled": True, "labels": {"release": "prometheus"}},
        **values,
    )
    assert {one["metadata"]["labels"]["team"] for one in got.values()} == {"a"}
    assert not [name for name in got if name.startswith("ConfigMap")]
    rules = got.pop("PrometheusRule web-events")
    assert rules["spec"] == yaml.safe_load((ROOT / "infra/monitoring/rules.yaml").read_text())
    assert rules["metadata"]["labels"]["release"] == "prometheus"
    assert got["ServiceAccount our-account"]["metadata"]["annotations"]
    binding = got["ClusterRoleBinding imds-bridge-web-events-drain"]
    assert [one["name"] for one in binding["subjects"]] == ["our-account"]
    labels = {"app.kubernetes.io/instance": "web"}
    more_labels = {"team": "a", "azure.workload.identity/use": "true"}
    image = {"image": f"registry.example.org/imds-bridge@sha256:{'0' * 64}", "imagePullPolicy": "Always"}
    for role, given in values.items():
        expected = documents(f"{role}.yaml")[-1]["spec"]
        chosen = {"imagePullSecrets": [{"name": "registry"}], "serviceAccountName": "our-account"}
        chosen |= {name: given[name] for name in ("affinity", "priorityClassName", "tolerations")}
        chosen |= {"nodeSelector": given.get("nodeSelector", {})}
        about = {"labels": {**labels, **more_labels}, "annotations": {"note": "a"}}
        # no other labels in the selector, which no upgrade can change
        merge(
            expected, {"selector": {"matchLabels": labels}, "template": {"metadata": about, "spec": chosen}}
        )
        expected["updateStrategy"] = given.get("updateStrategy", expected.get("updateStrategy"))
        spec = expected["template"]["spec"]
        sources = {"configMap": {"name": "our-config"}, "secret": {"secretName": "our-secret"}}
        sources["persistentVolumeClaim"] = {"claimName": f"web-events-{role}"}
        for volume in spec["volumes"]:
            merge(volume, {kind: name for kind, name in sources.items() if kind in volume})
        spec["volumes"] += given["volumes"]
        for each in (*spec.get("initContainers", ()), *spec["containers"]):
            merge(each, {**image, "resources": limits})
        for each in spec["containers"]:
            each["volumeMounts"] += given["volumeMounts"]
            each["env"] = [*each.get("env", []), *given["env"]]
            each["args"] = each["args"][:1]  # the file of extraArgs
            each["args"] += ["--dry-run"] if each["name"] == "listen" else []
            each["args"] += given["extraArgs"]
        assert {"updateStrategy": None, **workload(got, role, "web-events")} == expected
    assert_valid(got.values())


@pytest.mark.parametrize(("force", "cordon_only"), [(True, False), (False, False), (True, True)])
def test_one_value_takes_the_flag_and_the_right_to_delete_pods_and_another_keeps_pods(
    force: bool, cordon_only: bool
) -> None:
    values = {"enabled": True, "force": force, "cordonOnly": cordon_only}
    got = rendered(forward={"enabled": False}, drain=values)
    text = (FOLDER / "drain.toml").read_text()
    assert config_map(got, "imds-bridge-drain")["data"]["config.toml"] == text
    for one in workload(got, "drain", "imds-bridge")["template"]["spec"]["containers"]:
        switches = {
            each["name"]: each.get("value") for each in one.get("env", ()) if each["name"] != "NODE_NAME"
        }
        expected = ({} if force else {"DRAIN_FORCE": "false"}) | (
            {"DRAIN_CORDON_ONLY": "true"} if cordon_only else {}
        )
        assert switches == expected
    rules = got["ClusterRole imds-bridge-imds-bridge-drain"]["rules"]
    gone = [rule for rule in documents("drain.yaml")[1]["rules"] if rule not in rules]
    verbs = {(resource, verb) for rule in gone for resource in rule["resources"] for verb in rule["verbs"]}
    of_pods = {("pods", "list"), ("pods", "delete"), ("pods/eviction", "create")}
    assert verbs == (of_pods if cordon_only else set() if force else {("pods", "delete")})


@pytest.mark.parametrize("existing", ["", "mine"])
def test_a_value_tells_the_node_what_comes_by_a_sink_of_forward_and_one_right(existing: str) -> None:
    off = {"enabled": False}
    drain = {"enabled": True, "existingConfigMap": existing}
    plain = rendered(forward=off, drain=drain)
    got = rendered(forward=off, drain=drain | {"condition": True, "excludeFromLoadBalancers": True})
    role = "ClusterRole imds-bridge-imds-bridge-drain"
    more = [rule for rule in got[role]["rules"] if rule not in plain[role]["rules"]]
    assert more == [{"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]}]
    commented = (FOLDER / "drain.yaml").read_text().replace("# - { apiGroups", "- { apiGroups")
    assert more[0] in [*yaml.safe_load_all(commented)][1]["rules"]
    forward, listen = workload(got, "drain", "imds-bridge")["template"]["spec"]["containers"]
    node = {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    excluded = {"name": "DRAIN_EXCLUDE_FROM_LOAD_BALANCERS", "value": "true"}
    assert listen["env"] == [node, excluded]
    assert node in forward["env"]
    variables = {one["name"]: one["value"] for one in forward["env"] if one["name"].startswith("IMDS_")}
    sinks = load(FOLDER / "drain.toml", variables).sinks
    assert {*sinks} == {"log", "node_condition"}
    told = sinks["node_condition"].model_dump(include={"kind", "run", "types"})
    program = ("/opt/imds-bridge/bin/python", "/opt/imds-bridge/drain.py", "tell")
    assert {"kind": "exec", "run": program, "types": ("io.imdsbridge.document.changed.v1",)} == {
        name: tuple(value) if name != "kind" else value for name, value in told.items()
    }
    assert_valid(got.values())


SPELLINGS = [
    "run = ['/x', 'drain', '--force']",
    'run = ["/x", "drain","--force"]',
    'run = ["/x", "drain" , "--force"]',
    'run = [\n"/x",\n"drain",\n"--force"]',
    'run = ["/x", "drain", "--for"]',
    """run = ["sh", "-c", "/x drain --force"]""",
    'url_file = "drain"',
    '[sinks."drain"]',
    '[sinks.x]\nkind = "exec"\nrun = ["/y", "drain", "--force"]',
]


@pytest.mark.parametrize("text", SPELLINGS)
def test_the_switches_of_the_drain_change_no_text_in_any_spelling(text: str) -> None:
    got = rendered(
        forward={"enabled": False},
        drain={"enabled": True, "force": False, "cordonOnly": True, "config": text},
        checkConfig={"enabled": False},
    )
    assert config_map(got, "imds-bridge-drain")["data"]["config.toml"] == text


def test_an_older_image_that_does_not_know_the_switches_is_refused() -> None:
    off = {"enabled": False}
    switches = ({"cordonOnly": True}, {"condition": True}, {"excludeFromLoadBalancers": True})
    for switch in ({"force": False}, *switches):
        why = refused(image={"tag": "0.0.9"}, forward=off, drain={"enabled": True, **switch})
        assert "image.tag: 0.0.9 does not know the variables" in why
    rendered(image={"tag": "0.0.9"}, forward=off, drain={"enabled": True})
    rendered(image={"tag": "mine"}, forward=off, drain={"enabled": True, "cordonOnly": True})


@pytest.mark.parametrize(("other_release", "namespace"), [("db", "imds-bridge"), ("web", "other")])
def test_two_releases_have_nothing_in_common_but_the_state_on_a_node(
    other_release: str, namespace: str
) -> None:
    def places(release: str, namespace: str) -> set[str]:
        got = rendered(release, "--namespace", namespace, **everything())
        return {f"{name} {each['metadata'].get('namespace')}" for name, each in got.items()}

    one, other = places("web", "imds-bridge"), places(other_release, namespace)
    assert not one & other
    assert len(one) == len(other)


@pytest.mark.parametrize(
    ("role", "ports", "more"),
    [
        ("forward", [9464], {}),
        ("listen", [9465], {"apiVersion": "azmonitoring.coreos.com/v1"}),
        ("drain", [9464, 9465], {}),
        ("relay", [9464], {}),
    ],
)
def test_a_pod_monitor_finds_the_pods_of_its_release_and_opens_their_port(
    role: str, ports: list[int], more: dict[str, str]
) -> None:
    values = {"enabled": True, "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}, **more}}
    got = rendered("web", **{"forward": {"enabled": False}, role: values})
    monitor, template = got[f"PodMonitor web-{role}"], workload(got, role)["template"]
    assert monitor["apiVersion"] == more.get("apiVersion", "monitoring.coreos.com/v1")
    about, found = monitor["metadata"], monitor["spec"]
    assert (about["namespace"], about["labels"]["release"]) == ("imds-bridge", "prometheus")
    labels, containers = template["metadata"]["labels"], template["spec"]["containers"]
    assert found["selector"]["matchLabels"].items() <= labels.items()
    assert re.match("imds-bridge", labels[found["jobLabel"]])  # what the alerts expect
    assert found["podMetricsEndpoints"] == [{"port": one["name"], "interval": "30s"} for one in containers]
    for one, port in zip(containers, ports, strict=True):
        assert one["ports"] == [{"name": one["name"], "containerPort": port}]
        env = {each["name"]: each.get("value") for each in one["env"]}
        listen = MetricsSettings(listen=env["IMDS_BRIDGE__METRICS__LISTEN"]).listen
        assert listen == f"0.0.0.0:{port}"
        assert asked(one) == port
        host = None if role == "relay" else "127.0.0.1"  # of the node, or the pod's own address
        assert one["readinessProbe"]["httpGet"].get("host") == host


def asked(one: dict[str, Any]) -> int | None:
    """Return the port that the kubelet asks whether a container is ready, which it then does not leave, else None."""
    assert "exec" in one["livenessProbe"]  # a port that another process has would end it
    ready = one["readinessProbe"]
    assert ("exec" in ready) != ("httpGet" in ready)
    fixed = {"name": "IMDS_BRIDGE__METRICS__NEXT_PORT", "value": "false"}
    assert (fixed in one.get("env", ())) == ("httpGet" in ready)
    if "httpGet" not in ready:
        return None
    assert ready["httpGet"]["path"] == f"/readyz?role={one['name']}"
    return int(ready["httpGet"]["port"])


@pytest.mark.parametrize(
    ("config", "env", "port"),
    [
        ('[metrics]\nlisten = "127.0.0.1:9470"', None, 9470),
        ('[sinks.a]\nx = ["b"]\n[metrics] # on\n# of all\nlisten = "0.0.0.0:9470" # here\n[a]', None, 9470),
        ('# [metrics]\n# listen = "127.0.0.1:9470"', None, None),
        ('[a]\nx = """\n[metrics]\nlisten = "127.0.0.1:9470"\n"""', None, None),
        ("[a]\nx = '''\n[metrics]\nlisten = \"127.0.0.1:9470\"\n'''", None, None),
        (
            "# it's '''\n[a]\nx = [\"b #\\\"\", '\"\"\"']\ny = '''\n[metrics]\nlisten=1'''\n"
            '[metrics]\nlisten = "127.0.0.1:9471"',
            None,
            9471,
        ),
        ('[metrics]\n[other]\nlisten = "127.0.0.1:9470"', None, None),
        ('[metrics]\nlisten = "10.0.0.4:9470"', None, None),  # the address of one node
        ('[metrics]\nlisten = "127.0.0.1:9470"', "", None),  # a variable goes before it
    ],
)
def test_the_kubelet_asks_a_metrics_port_of_the_configuration_by_itself(
    config: str, env: str | None, port: int | None
) -> None:
    named = [] if env is None else [{"name": "IMDS_BRIDGE__METRICS__LISTEN", "value": env}]
    got = rendered(forward={"config": config, "env": named})
    one = only(workload(got, "forward", "imds-bridge")["template"]["spec"]["containers"])
    assert asked(one) == port


@contextmanager
def cluster(config_maps: list[dict[str, Any]]) -> Iterator[list[str]]:
    """Serve as much of an API server as Helm asks for in a dry run; yield the options that name it."""
    kinds = {
        "v1": ["ServiceAccount", "PersistentVolumeClaim", "ConfigMap"],
        "apps/v1": ["DaemonSet", "Deployment"],
        "rbac.authorization.k8s.io/v1": ["ClusterRole", "ClusterRoleBinding"],
    }
    versions = [{"groupVersion": version, "version": "v1"} for version in kinds if "/" in version]
    groups = [{"name": one["groupVersion"].partition("/")[0], "versions": [one]} for one in versions]
    answers: dict[str, Any] = {
        "/version": {"major": "1", "minor": "34"},
        "/api": {"versions": ["v1"]},
        "/apis": {"groups": groups},
        "/api/v1/namespaces/imds-bridge/configmaps": {"kind": "ConfigMapList", "items": config_maps},
    }
    for version, names in kinds.items():
        path = f"/apis/{version}" if "/" in version else f"/api/{version}"
        resources = [
            {"name": f"{one.lower()}s", "namespaced": "Role" not in one, "kind": one} for one in names
        ]
        answers[path] = {"groupVersion": version, "resources": resources}

    def answer(request: HttpRequest) -> Answer:
        found = answers.get(request.path)
        return json_answer(found or {}, 200 if found else 404)

    with closing(Server("cluster", answer)) as server:
        yield ["--kube-apiserver", server.url]


def test_the_configurations_that_a_cluster_has_stay_in_the_release() -> None:
    locked = {"immutable": True}

    def item(name: str, release: str = "web", at: str = "2026-02-01T00:00:00Z") -> dict[str, Any]:
        labels = {"app.kubernetes.io/instance": release}
        about = {"name": name, "labels": labels, "creationTimestamp": at}
        return {"metadata": about, "data": {"config.toml": name}} | ({} if name == "web-forward" else locked)

    # the version before had no hash; the others are another role's, another release's, and no configuration
    kept = ["web-forward", "web-forward-0123456789"]
    items = [*map(item, kept), item("web-forward-ca"), item("web-listen-0123456789")]
    items += [item("web-forward-1123456789", "web-2"), {"metadata": {"name": "x"}}]
    with cluster(items) as options:
        got = rendered("web", "--dry-run=server", *options)
    maps = {one["metadata"]["name"]: one for one in got.values() if one["kind"] == "ConfigMap"}
    assert (sorted(maps)[:2], len(maps)) == (kept, 3)
    for name in kept:
        assert maps[name]["data"] == {"config.toml": name}
        assert maps[name]["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert [maps[name].get("immutable") for name in kept] == [None, True]  # as they were
    names = [f"web-forward-{number:010x}" for number in range(12)]
    with cluster(
        [item(name, at=f"2026-01-{day:02}T00:00:00Z") for day, name in enumerate(names, 1)]
    ) as options:
        got = rendered("web", "--dry-run=server", *options)
    assert [name for name in names if f"ConfigMap {name}" in got] == names[2:]  # the newest ten


SURGE = {"updateStrategy": {"rollingUpdate": {"maxSurge": 1}}}


def patched(what: str) -> dict[str, Any]:
    """Return values whose patch has a list of the pod."""
    return {"patch": {"DaemonSet": {"spec": {"template": {"spec": {what: [{"name": "forward"}]}}}}}}


@pytest.mark.parametrize(
    ("role", "values", "why"),
    [
        ("forward", {"enabled": False}, "nothing is enabled"),
        ("drain", {"enabled": True}, "a node must not have two: set forward.enabled=false"),
        ("forward", SURGE, "forward: maxSurge starts a pod"),
        ("forward", {"patch": {"DaemonSet": {"spec": SURGE}}}, "forward: maxSurge starts a pod"),
        ("forward", {"existingConfigMap": "x", "config": "# y"}, "existingConfigMap takes the place"),
        ("forward", {"serviceAccount": {"create": False}}, "give the name of the account"),
        ("relay", {"updateStrategy": {"type": "OnDelete"}}, "/relay/updateStrategy"),
        ("relay", {"dryRun": True}, "/relay/dryRun"),
        ("image", {"digest": "sha256:12"}, "does not match pattern"),
        *(
            ("forward", patched(what), f"a list is replaced, so a patch of {what} would lose what the")
            for what in ("containers", "initContainers", "volumes")
        ),
        ("forward", patched("volumes"), "env, resources, volumes and volumeMounts of forward"),
        # What the API server would refuse.
        ("forward", {"volumes": [{"name": "state"}]}, 'forward.volumes: name "state" is there twice'),
        (
            "forward",
            {"volumeMounts": [{"name": "x", "mountPath": "/tmp"}]},  # noqa: S108 - of a container
            'forward.volumeMounts: mountPath "/tmp" is there twice',
        ),
        ("forward", {"env": [{"name": "A"}, {"name": "A"}]}, 'forward.env: name "A" is there twice'),
        ("forward", {"env": [{"name": "A", "valu": "b"}]}, "'valu' not allowed"),
        ("forward", {"env": [{"name": "A", "value": 1}]}, "want string"),
        ("forward", {"resources": {"limit": {}}}, "'limit' not allowed"),
        ("forward", {"podMonitor": {"enable": True}}, "'enable' not allowed"),
        ("forward", {"force": True}, "/forward/force"),
        ("drain", {"enable": True}, "'enable' not allowed"),
        ("forward", {"patch": {"daemonSet": {}}}, "'daemonSet' not allowed"),
    ],
)
def test_values_that_cannot_work_are_refused(role: str, values: dict[str, Any], why: str) -> None:
    assert why in refused(**{role: values})


def test_a_file_in_the_folder_that_is_not_the_charts_is_refused_by_its_name(tmp_path: Path) -> None:
    chart = tmp_path / "chart"
    shutil.copytree(FOLDER, chart)
    (chart / "__pycache__").mkdir(exist_ok=True)
    (chart / "__pycache__" / "drain.cpython-311.pyc").touch()  # ours, and not packed
    assert helm("template", "web", str(chart)).returncode == 0
    for name in ("teams-url", "secrets/key"):
        (chart / name).parent.mkdir(exist_ok=True)
        (chart / name).write_text("https://example.org/hook")
        assert f"{name} is in the chart's folder" in helm("template", "web", str(chart)).stderr
        (chart / name).unlink()


def test_a_drain_and_a_listen_on_the_same_nodes_and_two_relays_are_refused() -> None:
    off, on = {"enabled": False}, {"enabled": True}
    assert "drain has a listen of its own" in refused(forward=off, listen=on, drain=on)
    rendered(forward=off, listen=on | {"affinity": {"podAffinity": {}}}, drain=on)
    two = {"Deployment": {"spec": {"replicas": 2}}}
    assert "it has one replica" in refused(forward=off, relay=on | {"patch": two})


def test_the_accounts_name_their_namespace_so_that_kustomize_changes_the_bindings() -> None:
    every = (*documents("serviceaccounts.yaml"), *documents("drain.yaml"))
    accounts = [one["metadata"] for one in every if one["kind"] == "ServiceAccount"]
    assert {one["namespace"] for one in accounts} == {"imds-bridge"}
    assert len(accounts) == 3


def test_the_notes_name_the_command_that_waits_for_every_node() -> None:
    command = ["install", "web", ".", "--dry-run=client", "--namespace", "imds-bridge"]
    with cluster([]) as options:
        done = helm(*command, "--disable-openapi-validation", *options, values=everything())
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    for role in everything():
        kind = "deployment" if role == "relay" else "daemonset"
        assert f"kubectl -n imds-bridge rollout status {kind}/web-{role}\n" in notes


def test_the_schema_and_the_table_of_the_readme_are_those_of_the_values() -> None:
    assert json.loads(SCHEMA.read_text(encoding="utf-8")) == schema(), (
        "run python -m infra.kubernetes.generate"
    )
    text = README.read_text(encoding="utf-8")
    assert with_table(text) == text, "run python -m infra.kubernetes.generate"
    values = only(documents("values.yaml"))
    named = {*values, *values["drain"]} - {"forward"}
    assert [name for name in sorted(named) if not re.search(rf"[`.]{name}`", table())] == []


def test_the_chart_and_the_kustomization_are_of_one_version() -> None:
    chart, kustomization = only(documents("Chart.yaml")), only(documents("kustomization.yaml"))
    assert chart["version"] == chart["appVersion"] == kustomization["images"][0]["newTag"]
    assert only(documents("values.yaml"))["image"]["repository"] == kustomization["images"][0]["newName"]


def test_the_commands_of_the_readme_give_the_chart_what_it_takes(tmp_path: Path) -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"^helm upgrade --install (\S+ \. .+)$", text, re.MULTILINE)
    assert commands
    for name in ("drain", "web", "db"):
        (tmp_path / f"{name}.toml").write_text("# mine")
    for command in commands:
        done = helm(
            "template",
            *shlex.split(re.sub(r"=(?:\.\./)?(\w+\.toml)", rf"={tmp_path}/\1", command), comments=True),
        )
        assert done.returncode == 0, done.stderr


# --- the console ---

SECRET = "a secret that proves the proxy"  # noqa: S105 - of a test


def manifest(kind: str) -> dict[str, Any]:
    """Return the only manifest of a kind."""
    return only(one for name in OF_THE_CONSOLE for one in documents(name) if one["kind"] == kind)


def configuration(folder: Path, *, everything: bool) -> Path:
    """Write console.toml with its secret in a folder; with everything that it suggests, or as it is."""
    (folder / "proxy-secret").write_text(SECRET)
    text = (CONSOLE / "console.toml").read_text(encoding="utf-8")
    if everything:
        text = text.replace("\n# ", "\n")
    file = folder / "config.toml"
    file.write_text(text.replace("/run/secrets/imds-bridge", str(folder)))
    return file


def test_the_kustomization_names_every_file_and_the_pod_mounts_every_configuration() -> None:
    kustomization = only(documents("console/kustomization.yaml"))
    maps = {one["name"]: one["files"] for one in kustomization["configMapGenerator"]}
    named = {
        *kustomization["resources"],
        *(file.rpartition("=")[2] for files in maps.values() for file in files),
    }
    assert named == {path.name for path in CONSOLE.iterdir()} - {"kustomization.yaml"}
    assert {
        one["configMap"]["name"] for one in pod(THE_CONSOLE)["volumes"] if "configMap" in one
    } == maps.keys()
    assert maps[manifest("Deployment")["metadata"]["name"]] == ["config.toml=console.toml"]
    assert {one["name"] for one in kustomization["images"]} == {
        one["image"] for one in pod(THE_CONSOLE)["containers"]
    }
    assert kustomization["namespace"] == manifest("Namespace")["metadata"]["name"]


@pytest.mark.parametrize("everything", [False, True])
def test_the_configuration_of_the_console_is_valid_also_with_all_that_it_suggests(
    tmp_path: Path, everything: bool
) -> None:
    config = load(configuration(tmp_path, everything=everything), {})
    assert config.console
    assert (config.console.auth, config.console.viewer_groups) == ("proxy", ("viewer",))
    assert bool(config.approvals) == bool(config.console.approver_groups) == everything
    port = only(container(THE_CONSOLE, "console")["ports"])
    assert config.console.listen.endswith(f":{port['containerPort']}")


def test_the_pod_may_run_in_a_namespace_that_is_restricted_and_has_no_right_in_the_cluster() -> None:
    labels = manifest("Namespace")["metadata"]["labels"]
    assert labels == {"pod-security.kubernetes.io/enforce": "restricted"}
    spec = pod(THE_CONSOLE)
    assert_few_rights(spec, OF_THE_CONSOLE)
    assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & spec.keys()
    assert not [one for one in spec["volumes"] if "hostPath" in one]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert manifest("ServiceAccount")["automountServiceAccountToken"] is False


def test_one_pod_at_a_time_keeps_the_state_on_a_disk_and_has_time_to_end() -> None:
    spec = manifest("Deployment")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    mounted = {one["name"]: one["mountPath"] for one in container(THE_CONSOLE, "console")["volumeMounts"]}
    state = only(one for one in pod(THE_CONSOLE)["volumes"] if "persistentVolumeClaim" in one)
    claim = manifest("PersistentVolumeClaim")["metadata"]["name"]
    assert state["persistentVolumeClaim"]["claimName"] == claim
    assert mounted[state["name"]] == str(Config().state_dir)
    assert pod(THE_CONSOLE)["securityContext"]["fsGroup"] == pod(THE_CONSOLE)["securityContext"]["runAsUser"]
    assert pod(THE_CONSOLE)["terminationGracePeriodSeconds"] > 2 * STOP_SECONDS


def test_the_service_and_the_network_lead_only_to_the_proxy() -> None:
    proxy_port = only(container(THE_CONSOLE, "oauth2-proxy")["ports"])
    configured = only(documents("console/oauth2-proxy.yaml"))
    assert configured["server"]["bindAddress"] == f"0.0.0.0:{proxy_port['containerPort']}"
    labels = manifest("Deployment")["spec"]["template"]["metadata"]["labels"]
    service, policy = manifest("Service")["spec"], manifest("NetworkPolicy")["spec"]
    assert service["selector"] == policy["podSelector"]["matchLabels"] == labels
    assert [one["targetPort"] for one in service["ports"]] == [proxy_port["name"]]
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["ingress"] == [{"ports": [{"port": proxy_port["name"]}]}]
    assert service["publishNotReadyAddresses"] is True  # the pages are needed while the bus fails


def test_the_proxy_sets_every_header_that_is_believed_and_leads_back_to_the_address_that_people_open(
    tmp_path: Path,
) -> None:
    console = load(configuration(tmp_path, everything=False), {}).console
    assert console
    proxy = only(documents("console/oauth2-proxy.yaml"))
    upstream = only(proxy["upstreamConfig"]["upstreams"])
    port = console.listen.rpartition(":")[2]
    assert (upstream["path"], upstream["uri"]) == ("/", f"http://127.0.0.1:{port}")
    core = tomllib.loads((CONSOLE / "oauth2-proxy.cfg").read_text(encoding="utf-8"))
    assert core["redirect_url"] == f"{console.public_url}/oauth2/callback"
    assert "cookie_secure" not in core  # it is, by default
    assert core["session_cookie_minimal"] is True  # an Ingress has buffers of 4 KB
    routes = [route for route in core["api_routes"] if any(re.match(route, path) for path in ("/", "/fleet"))]
    assert (len(core["api_routes"]), routes) == (4, [])
    expected = ProxySettings.model_validate({"secret": SECRET})
    names = [header["name"] for header in proxy["injectRequestHeaders"]]
    assert names == [expected.secret_header, expected.user_header, expected.groups_header]
    assert not any(header.get("preserveRequestValue") for header in proxy["injectRequestHeaders"])
    files = [argument.partition("=")[2] for argument in container(THE_CONSOLE, "oauth2-proxy")["args"]]
    assert files == ["/etc/oauth2-proxy/oauth2-proxy.cfg", "/etc/oauth2-proxy/oauth2-proxy.yaml"]


def test_every_secret_has_a_file_that_the_readme_creates_and_the_console_gets_only_its_own() -> None:
    read = {
        file
        for name in ("console.toml", "oauth2-proxy.yaml", "oauth2-proxy.cfg")
        for file in re.findall(r"/run/secrets/[\w-]+/([\w-]+)", (CONSOLE / name).read_text(encoding="utf-8"))
    }
    volumes = {one["name"]: one["secret"] for one in pod(THE_CONSOLE)["volumes"] if "secret" in one}
    assert {one["secretName"] for one in volumes.values()} == {"imds-bridge-console"}
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    command = page.partition("create secret generic imds-bridge-console")[2].partition("```")[0]
    assert set(re.findall(r"--from-(?:literal|file)=([\w-]+)", command)) == read
    assert [one["key"] for one in volumes["secrets"]["items"]] == ["proxy-secret"]
    mounted = [one["name"] for one in container(THE_CONSOLE, "console")["volumeMounts"]]
    assert [name for name in mounted if name in volumes] == ["secrets"]
