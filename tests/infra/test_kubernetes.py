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
from bridge.service.composition import LAST_SECONDS
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


@pytest.mark.parametrize(("role", "address"), [("forward", "127.0.0.1:9464"), ("listen", "127.0.0.1:9465")])
def test_each_process_loads_its_own_configuration_with_a_port_of_its_own(role: str, address: str) -> None:
    volumes = {volume["name"]: volume for volume in pod(role)["volumes"]}
    everything = yaml.safe_load((FOLDER / "kustomization.yaml").read_text().replace("  # ", "  "))
    files = {one["name"]: one["files"] for one in everything["configMapGenerator"]}
    assert volumes["config"]["configMap"]["name"] == f"imds-bridge-{role}"
    assert files[f"imds-bridge-{role}"] == [f"config.toml={role}.toml"]
    assert re.findall(r'^# listen = "(\S+)"', (FOLDER / f"{role}.toml").read_text(), re.M) == [address]


# The two differ only in their role.


def test_a_pod_reaches_imds_and_has_no_right_in_the_cluster() -> None:
    spec = pod("forward")
    assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert spec["automountServiceAccountToken"] is False
    documents = [one for name in MANIFESTS for one in yaml.safe_load_all((FOLDER / name).read_text())]
    accounts = [one["metadata"]["name"] for one in documents if one["kind"] == "ServiceAccount"]
    assert spec["serviceAccountName"] in accounts
    assert {one["kind"] for one in documents} == {"DaemonSet", "Namespace", "ServiceAccount"}


def test_the_process_is_not_root_and_can_write_only_its_own_state_which_outlives_the_pod() -> None:
    security, user = container("forward")["securityContext"], pod("forward")["securityContext"]
    assert user["runAsNonRoot"] is True
    assert (security["readOnlyRootFilesystem"], security["allowPrivilegeEscalation"]) == (True, False)
    assert security["capabilities"] == {"drop": ["ALL"]}
    mounts = {mount["name"]: mount for mount in container("forward")["volumeMounts"]}
    assert [name for name, mount in mounts.items() if not mount.get("readOnly")] == ["state", "tmp"]
    (state,) = [volume for volume in pod("forward")["volumes"] if volume["name"] == "state"]
    assert state["hostPath"]["path"] == mounts["state"]["mountPath"] == f"{Config().state_dir}/forward"
    (first,) = pod("forward")["initContainers"]
    assert first["command"] == ["chown", f"{user['runAsUser']}:{user['runAsGroup']}", "/state"]
    assert first["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}


def test_every_probe_asks_for_this_process_which_is_given_the_time_that_an_orderly_stop_may_take() -> None:
    assert container("forward")["args"] == ["forward"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        command = container("forward")[probe]["exec"]["command"]
        assert command[:4] == ["python", "/opt/imds-bridge/health.py", "--role", "forward"]
    assert "--ready" not in container("forward")["livenessProbe"]["exec"]["command"]
    assert pod("forward")["terminationGracePeriodSeconds"] > Config().stop_seconds + LAST_SECONDS


def test_the_two_daemon_sets_differ_only_in_their_role() -> None:
    texts = [(FOLDER / f"{role}.yaml").read_text(encoding="utf-8").replace(role, "ROLE") for role in ROLES]
    lines = [[line for line in text.splitlines() if "readinessProbe" not in line] for text in texts]
    assert lines[0] == lines[1]
