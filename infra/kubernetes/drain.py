#!/usr/bin/env python3
"""Cordon and drain this node before an event, and uncordon it once the event is over; for `run` and kind `exec`.

    drain.py [FOLDER]     with token and ca.crt in FOLDER, by default those of the pod's service account

A Scheduled event drains. An event that is over removes its mark, and any other event the marks from before the last
boot; the last mark to be removed uncordons the node. Exit codes: 0 done; 75 not done, with the reason on standard
output: `run` does not approve then, and `exec` tries again.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import requests

T = TypeVar("T")
Json = dict[str, Any]

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MARK = "drain.imdsbridge.io/"  # an annotation of the node for each event that it is cordoned for
OVER = ("Completed", "Canceled", "Ended")
FAILED = 75
PAUSE_SECONDS = 2.0
ANSWER_SECONDS = 10.0
LATER = (401, 408, 409, 429)  # and 5xx: the token's file and the node change, budgets and servers recover


class Refused(Exception):
    """The API server's answer is not a success."""

    def __init__(self, answer: requests.Response) -> None:
        self.code = answer.status_code
        try:
            status = answer.json()
            causes = [cause.get("message", "") for cause in status.get("details", {}).get("causes", ())]
            text = " ".join((status["message"], *causes))
        except (ValueError, KeyError, AttributeError):
            text = answer.text[:200]
        super().__init__(f"{self.code} {text}".strip())


class Cluster:
    """The API server, as this pod's service account."""

    def __init__(self, folder: Path) -> None:
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
        self._address = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        self._folder = folder
        self._session = requests.Session()
        self._session.trust_env = False  # no proxy, and no other authorities

    def call(self, method: str, path: str, body: Json | None = None, **parameters: str) -> Json:
        """Return the answer; the token is read each time, since the kubelet replaces it."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        token = (self._folder / "token").read_text(encoding="ascii").strip()
        answer = self._session.request(
            *(method, self._address + path),
            params=parameters,
            data=None if body is None else json.dumps(body),
            headers={"Authorization": f"Bearer {token}", "Content-Type": kind},
            timeout=ANSWER_SECONDS,
            verify=str(self._folder / "ca.crt"),
            allow_redirects=False,
        )
        if not requests.codes.ok <= answer.status_code < requests.codes.multiple_choices:
            raise Refused(answer)
        return dict(answer.json())


class Node:
    """The node of this pod, and the mark of an event on it."""

    def __init__(self, cluster: Cluster, name: str, event_id: str) -> None:
        self._cluster = cluster
        self._name = name
        self._path = f"/api/v1/nodes/{quote(name, safe='')}"
        self._mark = MARK + re.sub(r"[^A-Za-z0-9.-]", "", event_id)[:63].strip(".-")
        self._boot_id = BOOT_ID.read_text(encoding="ascii").strip()
        self.reasons: dict[str, str] = {}  # why pods, by namespace and name, are still here

    def drain(self) -> None:
        """Cordon the node, evict its pods, and return when they are gone."""
        keep_trying(lambda: self._change(self._cordoned))
        pods = keep_trying(self._pods)
        first = {pod["metadata"]["uid"] for pod in pods}
        while pods:
            self.reasons = {_name(pod): self._evict(pod) for pod in pods}
            time.sleep(PAUSE_SECONDS)
            pods = [pod for pod in keep_trying(self._pods) if pod["metadata"]["uid"] in first]
        self.reasons = {}
        say(f"{self._name} is drained; pods that left: {len(first)}")

    def release(self, *, is_over: bool) -> None:
        """Remove the marks from before the last boot, and the event's own if it is over."""
        self._change(lambda node: self._released(node, is_over=is_over))

    def _change(self, changed: Callable[[Json], Json | None]) -> None:
        """Patch the node as `changed` says; refused if somebody else changes it at the same time."""
        node = self._cluster.call("GET", self._path)
        if patch := changed(node):
            patch["metadata"]["resourceVersion"] = node["metadata"]["resourceVersion"]
            self._cluster.call("PATCH", self._path, patch)

    def _cordoned(self, node: Json) -> Json | None:
        marks, is_cordoned = _marks(node), node["spec"].get("unschedulable", False)
        if is_cordoned and not marks:
            say(f"{self._name} was cordoned already, and not by a drain: it will not be uncordoned")
            return None
        # Marks on a node that is not cordoned are out of date: somebody has uncordoned it.
        old = {} if is_cordoned else dict.fromkeys(marks)
        return {
            "metadata": {"annotations": {**old, self._mark: self._boot_id}},
            "spec": {"unschedulable": True},
        }

    def _released(self, node: Json, *, is_over: bool) -> Json | None:
        marks = _marks(node)
        gone = {name for name, boot_id in marks.items() if boot_id != self._boot_id}
        gone |= {self._mark} & marks.keys() if is_over else set()
        if not gone:
            return None
        left = marks.keys() - gone
        say(f"{self._name} {'stays cordoned for ' + ', '.join(sorted(left)) if left else 'is uncordoned'}")
        patch = {"metadata": {"annotations": dict.fromkeys(gone)}}
        return patch if left else {**patch, "spec": {"unschedulable": None}}

    def _pods(self) -> list[Json]:
        """Return the pods that have to leave: not those of DaemonSets, of the kubelet's files, or finished ones."""
        pods = self._cluster.call("GET", "/api/v1/pods", fieldSelector=f"spec.nodeName={self._name}")
        return [pod for pod in pods["items"] if _has_to_leave(pod)]

    def _evict(self, pod: Json) -> str:
        """Have a pod evicted unless it leaves already; return why it is still there."""
        meta = pod["metadata"]
        if "deletionTimestamp" in meta:
            return "terminating"
        names = {"name": meta["name"], "namespace": meta["namespace"]}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": names}
        body["deleteOptions"] = {"preconditions": {"uid": meta["uid"]}}
        path = f"/api/v1/namespaces/{quote(meta['namespace'])}/pods/{quote(meta['name'])}/eviction"
        try:
            self._cluster.call("POST", path, body)
        except Refused as refused:
            if refused.code == requests.codes.forbidden and " cannot " in str(refused):
                raise  # a right is missing; a webhook, or a namespace that is being deleted, may change its mind
            return str(refused)  # 404, 409: it has gone, and another pod may have its name
        except requests.RequestException as error:
            return str(error)
        return "terminating"


def keep_trying(step: Callable[[], T]) -> T:
    """Return what the step returns; try again while the API server is down or overloaded."""
    while True:
        try:
            return step()
        except requests.RequestException as error:
            say(str(error))
        except Refused as refused:
            if refused.code not in LATER and refused.code < requests.codes.server_error:
                raise
            say(str(refused))
        time.sleep(PAUSE_SECONDS)


def _marks(node: Json) -> dict[str, str]:
    annotations = node["metadata"].get("annotations", {})
    return {name: value for name, value in annotations.items() if name.startswith(MARK)}


def _has_to_leave(pod: Json) -> bool:
    meta = pod["metadata"]
    owners = {owner["kind"] for owner in meta.get("ownerReferences", ())}
    is_mirror = "kubernetes.io/config.mirror" in meta.get("annotations", {})
    is_finished = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    return not (is_mirror or is_finished or "DaemonSet" in owners)


def _name(pod: Json) -> str:
    return f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"


def say(text: str) -> None:
    """Print a line at once: the program may be ended at any time."""
    print(f"drain: {text}", flush=True)


def main() -> int:
    """Do what the event asks for; return the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(FAILED))
    status = os.environ.get("IMDS_BRIDGE_EVENT_STATUS", "")
    try:
        cluster = Cluster(Path(sys.argv[1]) if sys.argv[1:] else SERVICE_ACCOUNT)
        node = Node(cluster, os.environ["NODE_NAME"], os.environ.get("IMDS_BRIDGE_EVENT_ID", ""))
    except KeyError as error:
        say(f"the environment variable {error} is missing: this runs in a pod as in drain.yaml")
        return FAILED
    try:
        if status == "Scheduled":
            node.drain()
        else:
            node.release(is_over=status in OVER)
    except SystemExit:
        left = "; ".join(f"{name}: {reason}" for name, reason in sorted(node.reasons.items()))
        say(f"ended before the node was drained; {left or 'no eviction was asked for'}")
        return FAILED
    except (Refused, requests.RequestException, OSError, ValueError) as error:
        say(str(error))
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
