"""The Kubernetes manifests: valid by Kubernetes' schemas, and with the documented properties."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from bridge.config.loader import load
from bridge.config.models import Config
from bridge.service.process import LAST_SECONDS
from tests.support.paths import ROOT
from tests.support.process import LIMIT_SECONDS

FOLDER = ROOT / "infra" / "kubernetes"
MANIFESTS = sorted(path.name for path in FOLDER.glob("*.yaml") if path.name != "kustomization.yaml")
OF_THE_CONSOLE = ["console/namespace.yaml", "console/console.yaml"]
ROLES = ["forward", "listen"]
KUBERNETES_VERSIONS = ["1.31.0", "1.34.0", "1.37.0"]


def read(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    return loaded


def pod(role: str) -> dict[str, Any]:
    """Return the pod's specification of a role's DaemonSet."""
    spec: dict[str, Any] = read(f"{role}.yaml")["spec"]["template"]["spec"]
    return spec


def container(role: str) -> dict[str, Any]:
    (only,) = pod(role)["containers"]
    return dict(only)


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_every_manifest_is_valid_by_the_strict_schemas_of_kubernetes(version: str) -> None:
    command = [sys.executable, "-m", "kubernetes_validate", "--strict", "--kubernetes-version", version]
    done = subprocess.run(
        [*command, *MANIFESTS, *OF_THE_CONSOLE],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARN" not in done.stdout + done.stderr


def test_the_kustomization_names_every_manifest_the_listeners_as_a_choice() -> None:
    text = (FOLDER / "kustomization.yaml").read_text(encoding="utf-8")
    assert {*read("kustomization.yaml")["resources"]} == {*MANIFESTS} - {"listen.yaml"}
    assert "# - listen.yaml" in text


@pytest.mark.parametrize("role", ROLES)
def test_the_configuration_of_a_process_is_valid_also_with_all_that_it_suggests(
    role: str, tmp_path: Path
) -> None:
    text = (FOLDER / f"{role}.toml").read_text(encoding="utf-8")
    assert isinstance(load(FOLDER / f"{role}.toml", {}), Config)
    head, _, rest = text.partition("\n")
    assert head.startswith("# ")
    suggested = rest.replace("\n# ", "\n")
    (tmp_path / "teams-url").write_text("https://example.org/hook")
    (tmp_path / "all.toml").write_text(suggested.replace("/run/secrets/imds-bridge", str(tmp_path)))
    everything = load(tmp_path / "all.toml", {})
    assert {*everything.sinks} == {*tomllib.loads(suggested)["sinks"]}
    assert everything.approvals
    assert everything.metrics.listen


@pytest.mark.parametrize("role", ROLES)
def test_each_process_loads_its_own_configuration(role: str) -> None:
    (mounted,) = [
        volume["configMap"]["name"] for volume in pod(role)["volumes"] if volume["name"] == "config"
    ]
    text = (FOLDER / "kustomization.yaml").read_text(encoding="utf-8")
    everything = yaml.safe_load(text.replace("  # ", "  "))
    files = {one["name"]: one["files"] for one in everything["configMapGenerator"]}
    assert mounted == f"imds-bridge-{role}"
    assert files[mounted] == [f"config.toml={role}.toml"]


def test_the_probes_of_the_two_processes_ask_different_ports() -> None:
    ports = [
        re.findall(r'^# listen = "(\S+)"', (FOLDER / f"{role}.toml").read_text(), re.M) for role in ROLES
    ]
    assert ports == [["127.0.0.1:9464"], ["127.0.0.1:9465"]]


@pytest.mark.parametrize("role", ROLES)
def test_a_pod_reaches_imds_and_has_no_right_in_the_cluster(role: str) -> None:
    spec = pod(role)
    assert spec["hostNetwork"] is True
    assert spec["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert spec["automountServiceAccountToken"] is False
    accounts = list(yaml.safe_load_all((FOLDER / "serviceaccounts.yaml").read_text(encoding="utf-8")))
    assert spec["serviceAccountName"] in [account["metadata"]["name"] for account in accounts]
    kinds = {one["kind"] for name in MANIFESTS for one in yaml.safe_load_all((FOLDER / name).read_text())}
    assert kinds == {"DaemonSet", "Namespace", "ServiceAccount"}


@pytest.mark.parametrize("role", ROLES)
def test_the_process_is_not_root_can_write_only_its_state_and_has_no_capability(role: str) -> None:
    security = container(role)["securityContext"]
    assert pod(role)["securityContext"]["runAsNonRoot"] is True
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    writable = [mount["name"] for mount in container(role)["volumeMounts"] if not mount.get("readOnly")]
    assert writable == ["state", "tmp"]


@pytest.mark.parametrize("role", ROLES)
def test_each_process_has_a_state_of_its_own_that_outlives_the_pod(role: str) -> None:
    (state,) = [volume for volume in pod(role)["volumes"] if volume["name"] == "state"]
    (mount,) = [mount for mount in container(role)["volumeMounts"] if mount["name"] == "state"]
    assert state["hostPath"]["path"] == mount["mountPath"] == f"{Config().state_dir}/{role}"


@pytest.mark.parametrize("role", ROLES)
def test_the_state_is_given_to_the_user_that_the_process_runs_as(role: str) -> None:
    (first,) = pod(role)["initContainers"]
    user = pod(role)["securityContext"]
    assert first["command"] == ["chown", f"{user['runAsUser']}:{user['runAsGroup']}", "/state"]
    assert first["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}


@pytest.mark.parametrize("role", ROLES)
def test_the_pod_is_given_the_time_that_an_orderly_stop_may_take(role: str) -> None:
    assert pod(role)["terminationGracePeriodSeconds"] > Config().stop_seconds + LAST_SECONDS


@pytest.mark.parametrize("role", ROLES)
def test_every_probe_asks_for_the_process_that_runs_here(role: str) -> None:
    assert container(role)["args"] == [role]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        command = container(role)[probe]["exec"]["command"]
        assert command[:4] == ["python", "/opt/imds-bridge/health.py", "--role", role]
    assert "--ready" not in container(role)["livenessProbe"]["exec"]["command"]


def test_the_two_daemon_sets_differ_only_in_their_role() -> None:
    texts = [(FOLDER / f"{role}.yaml").read_text(encoding="utf-8").replace(role, "ROLE") for role in ROLES]
    lines = [[line for line in text.splitlines() if "readinessProbe" not in line] for text in texts]
    assert lines[0] == lines[1]
