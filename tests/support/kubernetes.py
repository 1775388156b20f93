"""An API server for the drain: one node, pods and budgets over TLS, and no more rights than drain.yaml gives."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from ssl import SSLContext
from typing import Any, Self

import yaml

from bridge.lab import httpd
from bridge.lab.httpd import HttpRequest, Server, json_answer
from tests.support.only import only
from tests.support.paths import ROOT
from tests.support.tls import Authority

KUBERNETES = ROOT / "infra" / "kubernetes"
NODE = "node-0"
Json = dict[str, Any]
Answer = tuple[int, Json]
NO_ANSWER: Answer = (0, {})  # the connection ends
BUDGET = "Cannot evict pod as it would violate the pod's disruption budget."
_PATHS = {
    ("GET", r"/api/v1/nodes/(?P<name>[^/]+)"): ("nodes", "get"),
    ("PATCH", r"/api/v1/nodes/(?P<name>[^/]+)"): ("nodes", "patch"),
    ("PATCH", r"/api/v1/nodes/(?P<name>[^/]+)/status"): ("nodes/status", "patch"),
    ("GET", r"/api/v1/pods"): ("pods", "list"),
    ("POST", r"/api/v1/namespaces/shop/pods/(?P<name>[^/]+)/eviction"): ("pods/eviction", "create"),
    ("DELETE", r"/api/v1/namespaces/shop/pods/(?P<name>[^/]+)"): ("pods", "delete"),
    ("POST", r"/api/v1/namespaces/default/events"): ("events", "create"),
}


def rights() -> set[tuple[str, str]]:
    """Return each resource and verb that the ClusterRole in drain.yaml allows."""
    documents = yaml.safe_load_all((KUBERNETES / "drain.yaml").read_text(encoding="utf-8"))
    role = only(one for one in documents if one["kind"] == "ClusterRole")
    assert [rule["apiGroups"] for rule in role["rules"]] == [[""]] * len(role["rules"])
    return {(name, verb) for rule in role["rules"] for name in rule["resources"] for verb in rule["verbs"]}


def status(code: int, message: str, *causes: str) -> Answer:
    """Return an answer that is no success."""
    details = {"causes": [{"message": cause} for cause in causes]}
    return code, {"kind": "Status", "status": "Failure", "message": message, "details": details}


class ApiServer:
    """The cluster of one test; `folder` is what the kubelet mounts into a pod.

    `before` holds, for a resource and a verb, functions of which each request calls one, which may give its answer;
    `refusals`, by the name of a pod, what the first requests to evict it get. A terminating pod is gone after
    `lingers` lists of the pods; `graces` are the grace periods that it was given, None for its own.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.node: Json = {"metadata": {"name": NODE, "uid": "uid-node", "resourceVersion": "1"}, "spec": {}}
        self.pods: dict[str, Json] = {}
        self.lingers: dict[str, int] = {}
        self.rights = rights()
        self.calls: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        self.managers: list[str] = []
        self.evictions: list[str] = []
        self.conflicts = 0
        self.deletions: list[str] = []
        self.graces: dict[str, int | None] = {}
        self.events: list[Json] = []
        self.refusals: dict[str, list[Answer]] = {}
        self.before: dict[tuple[str, str], list[Callable[[], Answer | None]]] = {}
        authority = Authority(folder)
        (folder / "ca.crt").write_bytes(authority.file.read_bytes())
        self.change_token("token-1")
        self._server = _Server(authority.server(), self._handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    @property
    def environment(self) -> dict[str, str]:
        """What the kubelet, and drain.yaml, set in a container."""
        port = str(self._server.server_address[1])
        address = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": port}
        return {**address, "NODE_NAME": NODE}

    def change_token(self, token: str) -> None:
        """Replace the token, in the file too."""
        self.token = token
        (self.folder / "token").write_text(f"{token}\n")

    def add(self, name: str, *, uid: str = "", owner: str = "ReplicaSet", **changes: Any) -> None:
        """Add a pod to the node; `changes` are of its metadata, `phase`, `node` and `grace` apart."""
        node, phase = changes.pop("node", NODE), changes.pop("phase", "Running")
        grace = changes.pop("grace", 30)
        meta = {"name": name, "namespace": "shop", "uid": uid or f"uid-{name}", **changes}
        if owner:
            meta["ownerReferences"] = [{"kind": owner, "controller": True}]
        spec = {"nodeName": node, "terminationGracePeriodSeconds": grace}
        self.pods[name] = {"metadata": meta, "spec": spec, "status": {"phase": phase}}

    @property
    def marks(self) -> dict[str, str]:
        return dict(self.node["metadata"].get("annotations", {}))

    @property
    def is_cordoned(self) -> bool:
        return bool(self.node["spec"].get("unschedulable", False))

    def touch_node(self, **spec: Any) -> None:
        """Change the node as somebody else does."""
        self.node["spec"] |= spec
        self.node["metadata"]["resourceVersion"] += "0"

    def _handle(self, request: HttpRequest) -> httpd.Answer:
        """Answer a request as the API server does."""
        code, content = self._answer(request)
        return json_answer(content, code) if code else httpd.Answer(drop=True)

    def _answer(self, request: HttpRequest) -> Answer:
        if request.headers["authorization"] != f"Bearer {self.token}":
            return status(401, "Unauthorized")
        for (method, pattern), (resource, verb) in _PATHS.items():
            if (found := re.fullmatch(pattern, request.path)) and request.method == method:
                self.calls.append((resource, verb))
                if (resource, verb) not in self.rights:
                    user = "system:serviceaccount:imds-bridge:imds-bridge-drain"
                    why = f'User "{user}" cannot {verb} resource "{resource}" in API group ""'
                    return status(403, f"{resource} is forbidden: {why}")
                with self._lock:
                    steps = self.before.get((resource, verb))
                    step = steps.pop(0) if steps else None
                if step and (given := step()):
                    return given
                handle = getattr(self, f"_{verb}_{resource.replace('/', '_')}")
                answer: Answer = handle(request, **found.groupdict())
                return answer
        raise AssertionError(f"{request.method} {request.path} is no call of the API")

    def _get_nodes(self, _: HttpRequest, name: str) -> Answer:
        return (200, self.node) if name == NODE else status(404, f'nodes "{name}" not found')

    def _patch_nodes(self, request: HttpRequest, **_: str) -> Answer:
        assert request.headers["content-type"] == "application/merge-patch+json"
        self.managers.append(request.headers["user-agent"].partition("/")[0])
        patch = request.json()
        if patch["metadata"].pop("resourceVersion") != self.node["metadata"]["resourceVersion"]:
            self.conflicts += 1
            return status(
                409, "the object has been modified; please apply your changes to the latest version"
            )
        before = json.dumps(self.node)
        merge(self.node, patch)
        if json.dumps(self.node) != before:  # else the version stays
            self.touch_node()
        return 200, self.node

    def _patch_nodes_status(self, request: HttpRequest, **_: str) -> Answer:
        """Change the status, and of metadata labels and annotations; leave the spec as it is."""
        patch = {name: value for name, value in request.json().items() if name in ("status", "metadata")}
        kind = request.headers["content-type"]
        assert kind in ("application/merge-patch+json", "application/strategic-merge-patch+json")
        if kind == "application/strategic-merge-patch+json":
            found = self.node.get("status", {}).get("conditions", [])
            patch["status"]["conditions"] = merge_list(found, patch["status"].get("conditions", []), "type")
        merge(self.node, patch)
        self.touch_node()
        return 200, self.node

    def _list_pods(self, request: HttpRequest) -> Answer:
        assert request.parameters == {"fieldSelector": [f"spec.nodeName={NODE}"]}
        for name in [name for name, pod in self.pods.items() if "deletionTimestamp" in pod["metadata"]]:
            self.lingers[name] = self.lingers.get(name, 0) - 1
            if self.lingers[name] < 0:
                del self.pods[name]
        return 200, {"items": [pod for pod in self.pods.values() if pod["spec"]["nodeName"] == NODE]}

    def _create_pods_eviction(self, request: HttpRequest, name: str) -> Answer:
        eviction = request.json()
        assert (eviction["apiVersion"], eviction["kind"]) == ("policy/v1", "Eviction")
        assert eviction["metadata"] == {"name": name, "namespace": "shop"}
        self.evictions.append(name)
        if self.refusals.get(name):
            return self.refusals[name].pop(0)
        return self._end(name, eviction["deleteOptions"])

    def _delete_pods(self, request: HttpRequest, name: str) -> Answer:
        options = request.json()
        assert (options["apiVersion"], options["kind"]) == ("v1", "DeleteOptions")
        self.deletions.append(name)
        return self._end(name, options)

    def _end(self, name: str, options: Json) -> Answer:
        if name not in self.pods:
            return status(404, f'pods "{name}" not found')
        meta = self.pods[name]["metadata"]
        if options["preconditions"]["uid"] != meta["uid"]:
            return status(409, "the UID in the precondition does not match")
        self.graces[name] = options.get("gracePeriodSeconds")
        meta["deletionTimestamp"] = "2026-11-22T10:00:00Z"
        return 201, {"kind": "Status", "status": "Success"}

    def _create_events(self, request: HttpRequest) -> Answer:
        event = request.json()
        meta = event["metadata"]
        assert (event["apiVersion"], event["kind"], meta["namespace"]) == ("v1", "Event", "default")
        assert meta["generateName"]
        # What `kubectl describe node` asks for: the node's uid or, as the kubelet has it, its name in that place.
        uid = event["involvedObject"].pop("uid")
        assert uid in (self.node["metadata"]["uid"], NODE)
        assert event["involvedObject"] == {"apiVersion": "v1", "kind": "Node", "name": NODE}
        assert event["type"] in ("Normal", "Warning")
        assert len(event["message"]) <= 1024
        assert re.fullmatch(r"20\d\d-\d\d-\d\dT[\d:]{8}Z", event["firstTimestamp"])
        self.events.append(event)
        return 201, event

    @property
    def told(self) -> list[tuple[str, str]]:
        """The reason and the message of each Kubernetes Event."""
        return [(event["reason"], event["message"]) for event in self.events]


def merge(target: Json, patch: Json) -> None:
    """Apply a JSON merge patch (RFC 7396)."""
    for name, value in patch.items():
        if isinstance(value, dict):
            merge(target.setdefault(name, {}), value)
        elif value is None:
            target.pop(name, None)
        else:
            target[name] = value


def merge_list(found: list[Json], patch: list[Json], key: str) -> list[Json]:
    """Return a list after a strategic merge patch: items are merged by a key, and `$patch: delete` removes one."""
    items = {one[key]: dict(one) for one in found}
    for one in patch:
        if one.get("$patch") == "delete":
            items.pop(one[key], None)
        else:
            merge(items.setdefault(one[key], {}), one)
    return [*items.values()]


class _Server(Server):
    """An HTTP server with TLS."""

    def __init__(self, context: SSLContext, handle: Callable[[HttpRequest], httpd.Answer]) -> None:
        self._context = context
        super().__init__("kubernetes", handle)

    def server_activate(self) -> None:
        super().server_activate()
        self.socket = self._context.wrap_socket(self.socket, server_side=True)

    def handle_error(self, *given: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # the drain was ended while it waited for an answer
            super().handle_error(*given)
