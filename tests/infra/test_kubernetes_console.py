"""The console on Kubernetes: its manifests, and the console itself with the configuration that they mount."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from bridge.config.console import ProxySettings
from bridge.config.loader import load
from bridge.config.models import Config
from bridge.console.process import STOP_SECONDS
from tests.support.paths import ROOT

FOLDER = ROOT / "infra" / "kubernetes" / "console"
MANIFESTS = ["namespace.yaml", "console.yaml"]
README = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
SECRET = "a secret that proves the proxy"  # noqa: S105 - of a test


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


def manifest(kind: str) -> dict[str, Any]:
    """Return the only manifest of a kind."""
    [found] = [one for name in MANIFESTS for one in documents(name) if one["kind"] == kind]
    return found


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = manifest("Deployment")["spec"]["template"]["spec"]
    return spec


def container(name: str) -> dict[str, Any]:
    [found] = [one for one in pod()["containers"] if one["name"] == name]
    return dict(found)


def configuration(folder: Path, *, everything: bool) -> Path:
    """Write console.toml with its secret in a folder; with everything that it suggests, or as it is."""
    (folder / "proxy-secret").write_text(SECRET)
    text = (FOLDER / "console.toml").read_text(encoding="utf-8")
    if everything:
        text = text.replace("\n# ", "\n")
    file = folder / "config.toml"
    file.write_text(text.replace("/run/secrets/imds-bridge", str(folder)))
    return file


def test_the_kustomization_names_every_file_and_the_pod_mounts_every_configuration() -> None:
    [kustomization] = documents("kustomization.yaml")
    maps = {one["name"]: one["files"] for one in kustomization["configMapGenerator"]}
    named = {
        *kustomization["resources"],
        *(file.rpartition("=")[2] for files in maps.values() for file in files),
    }
    assert named == {path.name for path in FOLDER.iterdir()} - {"kustomization.yaml"}
    assert {one["configMap"]["name"] for one in pod()["volumes"] if "configMap" in one} == maps.keys()
    assert maps[manifest("Deployment")["metadata"]["name"]] == ["config.toml=console.toml"]
    assert {one["name"] for one in kustomization["images"]} == {one["image"] for one in pod()["containers"]}
    assert kustomization["namespace"] == manifest("Namespace")["metadata"]["name"]


@pytest.mark.parametrize("everything", [False, True])
def test_the_configuration_of_the_console_is_valid_also_with_all_that_it_suggests(
    tmp_path: Path, everything: bool
) -> None:
    config = load(configuration(tmp_path, everything=everything), {})
    assert config.console
    assert (config.console.auth, config.console.viewer_groups) == ("proxy", ("viewer",))
    assert bool(config.approvals) == bool(config.console.approver_groups) == everything
    assert (
        f":{config.console.listen.rpartition(':')[2]}"
        == f":{container('console')['ports'][0]['containerPort']}"
    )


def test_the_pod_may_run_in_a_namespace_that_is_restricted_and_has_no_right_in_the_cluster() -> None:
    labels = manifest("Namespace")["metadata"]["labels"]
    assert labels == {"pod-security.kubernetes.io/enforce": "restricted"}
    spec = pod()
    assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & spec.keys()
    assert not [one for one in spec["volumes"] if "hostPath" in one]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for one in spec["containers"]:
        assert one["securityContext"]["allowPrivilegeEscalation"] is False
        assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    account = manifest("ServiceAccount")
    assert spec["serviceAccountName"] == account["metadata"]["name"]
    assert spec["automountServiceAccountToken"] is account["automountServiceAccountToken"] is False
    assert not [one["kind"] for name in MANIFESTS for one in documents(name) if "Role" in one["kind"]]


def test_one_pod_at_a_time_keeps_the_state_on_a_disk_and_has_time_to_end() -> None:
    spec = manifest("Deployment")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    mounted = {one["name"]: one["mountPath"] for one in container("console")["volumeMounts"]}
    [state] = [one for one in pod()["volumes"] if "persistentVolumeClaim" in one]
    claim = manifest("PersistentVolumeClaim")["metadata"]["name"]
    assert state["persistentVolumeClaim"]["claimName"] == claim
    assert mounted[state["name"]] == str(Config().state_dir)
    assert pod()["securityContext"]["fsGroup"] == pod()["securityContext"]["runAsUser"]
    assert pod()["terminationGracePeriodSeconds"] > 2 * STOP_SECONDS


def test_the_service_and_the_network_lead_only_to_the_proxy() -> None:
    [proxy_port] = container("oauth2-proxy")["ports"]
    [configured] = documents("oauth2-proxy.yaml")
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
    [proxy] = documents("oauth2-proxy.yaml")
    [upstream] = proxy["upstreamConfig"]["upstreams"]
    assert (upstream["path"], upstream["uri"]) == (
        "/",
        f"http://127.0.0.1:{console.listen.rpartition(':')[2]}",
    )
    core = tomllib.loads((FOLDER / "oauth2-proxy.cfg").read_text(encoding="utf-8"))
    assert core["redirect_url"] == f"{console.public_url}/oauth2/callback"
    assert "cookie_secure" not in core  # it is, by default
    expected = ProxySettings.model_validate({"secret": SECRET})
    names = [header["name"] for header in proxy["injectRequestHeaders"]]
    assert names == [expected.secret_header, expected.user_header, expected.groups_header]
    assert not any(header.get("preserveRequestValue") for header in proxy["injectRequestHeaders"])
    files = [argument.partition("=")[2] for argument in container("oauth2-proxy")["args"]]
    assert files == ["/etc/oauth2-proxy/oauth2-proxy.cfg", "/etc/oauth2-proxy/oauth2-proxy.yaml"]


def test_every_secret_has_a_file_that_the_readme_creates_and_the_console_gets_only_its_own() -> None:
    read = {
        file
        for name in ("console.toml", "oauth2-proxy.yaml", "oauth2-proxy.cfg")
        for file in re.findall(r"/run/secrets/[\w-]+/([\w-]+)", (FOLDER / name).read_text(encoding="utf-8"))
    }
    volumes = {one["name"]: one["secret"] for one in pod()["volumes"] if "secret" in one}
    assert {one["secretName"] for one in volumes.values()} == {"imds-bridge-console"}
    command = README.partition("create secret generic imds-bridge-console")[2].partition("```")[0]
    assert set(re.findall(r"--from-(?:literal|file)=([\w-]+)", command)) == read
    assert [one["key"] for one in volumes["secrets"]["items"]] == ["proxy-secret"]
    assert [one["name"] for one in container("console")["volumeMounts"] if one["name"] in volumes] == [
        "secrets"
    ]
