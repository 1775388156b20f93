#!/usr/bin/env python3
"""Cordon and drain this node before an event, and uncordon it once the event is over; for `run` and kind `exec`.

    drain.py [FOLDER [IMDS]]     with token and ca.crt in FOLDER, by default those of the pod's service account;
                                 and the address of IMDS

A Scheduled event drains. An event that is over removes its mark; it, and any other event, removes the marks from
before the last boot whose events are no longer in the document of IMDS. The last mark to be removed uncordons the
node. What was done is a Kubernetes Event of the node, too. Exit codes: 0 done; 75 not done, with the reason
on standard output: `run` does not approve then, and `exec` tries again.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar
from urllib.parse import quote

import requests
from requests.adapters import HTTPAdapter

T = TypeVar("T")
Json = dict[str, Any]

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MARK = "drain.imdsbridge.io/"  # an annotation of the node for each event that it is cordoned for
OVER = ("Completed", "Canceled", "Ended")
FAILED = 75
PAUSE_SECONDS = 2.0
ANSWER_SECONDS = 10.0
LAST_SECONDS = 2.0  # for the Kubernetes Event: after SIGTERM there are 5 s
AT_ONCE = 16  # evictions
IMDS = "http://169.254.169.254"
DOCUMENT = "/metadata/scheduledevents?api-version=2020-07-01"
LATER = (401, 408, 409, 429)  # and 5xx: the token's file and the node change, budgets and servers recover
IS_GONE = (404, 409)  # the answers to the eviction of a pod that has gone; another one may have its name
GOING = ("terminating", "gone")
# What the API server itself says of a right; a webhook's text begins with the webhook, and it may change its mind.
NO_RIGHT = re.compile(r'403 \S+( "[^"]*")? is forbidden: User "[^"]*" cannot \w+ resource "')
REASON_CHARACTERS = 1000  # of the 1,024 of a Kubernetes Event


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

    @property
    def is_final(self) -> bool:
        """Whether it makes no sense to ask again: a right is missing, or the request is wrong."""
        if self.code == requests.codes.forbidden:
            return bool(NO_RIGHT.match(str(self)))
        return self.code not in LATER and self.code < requests.codes.server_error


class Cluster:
    """The API server, as this pod's service account."""

    def __init__(self, folder: Path) -> None:
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
        self._address = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        self._folder = folder
        self._session = requests.Session()
        self._session.trust_env = False  # no proxy, and no other authorities
        self._session.mount("https://", HTTPAdapter(pool_maxsize=AT_ONCE))

    def call(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        seconds: float = ANSWER_SECONDS,
        **parameters: str,
    ) -> Json:
        """Return the answer; the token is read each time, since the kubelet replaces it."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        token = (self._folder / "token").read_text(encoding="ascii").strip()
        answer = self._session.request(
            *(method, self._address + path),
            params=parameters,
            data=None if body is None else json.dumps(body),
            headers={"Authorization": f"Bearer {token}", "Content-Type": kind},
            timeout=seconds,
            verify=str(self._folder / "ca.crt"),
            allow_redirects=False,
        )
        if not requests.codes.ok <= answer.status_code < requests.codes.multiple_choices:
            raise Refused(answer)
        return dict(answer.json())


class Node:
    """The node of this pod, and the mark of an event on it."""

    def __init__(self, cluster: Cluster, name: str, event_id: str, imds: str = IMDS) -> None:
        self._cluster = cluster
        self._name = self._uid = name
        self._path = f"/api/v1/nodes/{quote(name, safe='')}"
        self._event_id = event_id
        self._imds = imds
        self._boot_id = BOOT_ID.read_text(encoding="ascii").strip()
        self._asked: set[str] = set()
        self._reasons: dict[str, str] = {}  # why pods, by namespace and name, are still here

    def drain(self) -> None:
        """Cordon the node, evict its pods, and return when they are gone."""
        keep_trying(lambda: self._change(self._cordoned))
        pods = keep_trying(self._pods)
        first = {pod["metadata"]["uid"] for pod in pods}
        self._reasons = {_name(pod): "not asked to leave yet" for pod in pods}
        is_told = False
        while pods:
            in_parallel(self._evict, pods)
            if not is_told and (refused := self._still_here(but=GOING)):
                self.tell("Warning", "EvictionRefused", f"It is asked for again: {refused}")
                is_told = True
            time.sleep(PAUSE_SECONDS)
            pods = [pod for pod in keep_trying(self._pods) if pod["metadata"]["uid"] in first]
            self._reasons = {_name(pod): self._reasons[_name(pod)] for pod in pods}
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is done
        say(f"{self._name} is drained; pods that left: {len(first)}")
        self.tell("Normal", "Drained", f"Drained for event {self._event_id}; pods that left: {len(first)}")

    def give_up(self, reason: str) -> None:
        """Say why the node is not drained, what was asked for, and which pods are left."""
        asked = (
            f"evictions were asked for: {len(self._asked)}" if self._asked else "no eviction was asked for"
        )
        left = f"; {self._still_here()}" if self._reasons else ""
        say(f"{reason}; {asked}{left}")
        self.tell("Warning", "NotDrained", f"Event {self._event_id}: {reason}; {asked}{left}")

    def release(self, *, is_over: bool) -> None:
        """Remove the event's own mark if it is over, and those from before the last boot of events that are gone."""
        node = self._change(lambda node: self._released(node, is_over=is_over))
        if node and not _marks(node):
            say(f"{self._name} is uncordoned")
            self.tell("Normal", "Uncordoned", "No event is left that it was cordoned for")
        elif node:
            say(f"{self._name} stays cordoned for {', '.join(sorted(_marks(node)))}")

    def tell(self, kind: str, reason: str, message: str) -> None:
        """Write a Kubernetes Event of the node, which `kubectl describe node` shows; a failure is only printed."""
        at = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        body: Json = {"apiVersion": "v1", "kind": "Event", "type": kind, "reason": reason, "count": 1}
        body["metadata"] = {
            "generateName": "imds-bridge-",
            "namespace": "default",
        }  # that of objects without one
        body["involvedObject"] = {"apiVersion": "v1", "kind": "Node", "name": self._name, "uid": self._uid}
        body["source"] = {"component": "imds-bridge", "host": self._name}
        body |= {"message": message[:REASON_CHARACTERS], "firstTimestamp": at, "lastTimestamp": at}
        try:
            self._cluster.call("POST", "/api/v1/namespaces/default/events", body, seconds=LAST_SECONDS)
        except (Refused, requests.RequestException, OSError, ValueError) as error:
            say(f"the Kubernetes Event {reason} is not written: {error}")

    def _still_here(self, *, but: Sequence[str] = ()) -> str:
        reasons = self._reasons.copy()  # threads may change it
        return "; ".join(f"{name}: {reason}" for name, reason in sorted(reasons.items()) if reason not in but)

    def _change(self, changed: Callable[[Json], Json | None]) -> Json | None:
        """Patch the node as `changed` says; return it, or None if nothing is to be changed.

        Raises:
            Refused: also if somebody else changes it at the same time.
        """
        node = self._cluster.call("GET", self._path)
        self._uid = node["metadata"].get("uid", self._name)
        if not (patch := changed(node)):
            return None
        patch["metadata"]["resourceVersion"] = node["metadata"]["resourceVersion"]
        return self._cluster.call("PATCH", self._path, patch)

    def _cordoned(self, node: Json) -> Json | None:
        marks, is_cordoned = _marks(node), node["spec"].get("unschedulable", False)
        if is_cordoned and not marks:
            say(f"{self._name} was cordoned already, and not by a drain: it will not be uncordoned")
            return None
        # Marks on a node that is not cordoned are out of date: somebody has uncordoned it.
        old = {} if is_cordoned else dict.fromkeys(marks)
        return {
            "metadata": {"annotations": {**old, _mark(self._event_id): self._boot_id}},
            "spec": {"unschedulable": True},
        }

    def _released(self, node: Json, *, is_over: bool) -> Json | None:
        marks = _marks(node)
        gone = {_mark(self._event_id)} & marks.keys() if is_over else set()
        # A reboot for another reason ends no event that is still announced.
        if old := {name for name, boot_id in marks.items() if boot_id != self._boot_id} - gone:
            gone |= old - self._announced()
        if not gone:
            return None
        patch: Json = {"metadata": {"annotations": dict.fromkeys(gone)}}
        return patch if marks.keys() - gone else {**patch, "spec": {"unschedulable": None}}

    def _announced(self) -> set[str]:
        """Return the marks of the events in the document."""
        with requests.Session() as session:
            session.trust_env = False
            answer = session.get(
                self._imds + DOCUMENT,
                headers={"Metadata": "true"},
                timeout=ANSWER_SECONDS,
                allow_redirects=False,
            )
        if answer.status_code != requests.codes.ok:
            raise ValueError(f"IMDS answers {answer.status_code}")
        try:
            return {_mark(event["EventId"]) for event in answer.json()["Events"]}
        except (KeyError, TypeError) as error:
            raise ValueError(f"the document of IMDS has no valid Events: {error!r}") from error

    def _pods(self) -> list[Json]:
        """Return the pods that have to leave: not those of DaemonSets, of the kubelet's files, or finished ones."""
        pods = self._cluster.call("GET", "/api/v1/pods", fieldSelector=f"spec.nodeName={self._name}")
        return [pod for pod in pods["items"] if _has_to_leave(pod)]

    def _evict(self, pod: Json) -> None:
        """Have a pod evicted unless it leaves already; note why it is still there."""
        meta, name = pod["metadata"], _name(pod)
        if "deletionTimestamp" in meta:
            self._reasons[name] = "terminating"
            return
        names = {"name": meta["name"], "namespace": meta["namespace"]}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": names}
        body["deleteOptions"] = {"preconditions": {"uid": meta["uid"]}}
        path = f"/api/v1/namespaces/{quote(meta['namespace'])}/pods/{quote(meta['name'])}/eviction"
        if name not in self._asked:
            self._asked.add(name)
            self._reasons[name] = "asked to leave, not answered yet"
        try:
            self._cluster.call("POST", path, body)
        except Refused as refused:
            if refused.code == requests.codes.forbidden and refused.is_final:
                raise
            self._reasons[name] = "gone" if refused.code in IS_GONE else str(refused)
        except requests.RequestException as error:
            self._reasons[name] = str(error)
        else:
            self._reasons[name] = "terminating"


def in_parallel(step: Callable[[T], None], items: Sequence[T]) -> None:
    """Call the step for each item, for some at once; raise the first error when all are done.

    The threads do not delay the end of the program.
    """
    left, errors = deque(items), deque[Exception]()

    def work() -> None:
        while left and not errors:
            try:
                item = left.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                step(item)
            except Exception as error:  # noqa: BLE001 - it is raised below
                errors.append(error)

    threads = [Thread(target=work, daemon=True) for _ in items[:AT_ONCE]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def keep_trying(step: Callable[[], T]) -> T:
    """Return what the step returns; try again while the API server is down or overloaded."""
    while True:
        try:
            return step()
        except requests.RequestException as error:
            say(str(error))
        except Refused as refused:
            if refused.is_final:
                raise
            say(str(refused))
        time.sleep(PAUSE_SECONDS)


def _mark(event_id: str) -> str:
    """Return the name of the annotation of an event."""
    return MARK + re.sub(r"[^A-Za-z0-9.-]", "", event_id)[:63].strip(".-")


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
        event_id = os.environ.get("IMDS_BRIDGE_EVENT_ID", "")
        node = Node(cluster, os.environ["NODE_NAME"], event_id, *sys.argv[2:3])
    except KeyError as error:
        say(f"the environment variable {error} is missing: this runs in a pod as in drain.yaml")
        return FAILED
    try:
        if status == "Scheduled":
            node.drain()
        else:
            node.release(is_over=status in OVER)
    except SystemExit:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        node.give_up("ended before the node was drained")
        return FAILED
    except (Refused, requests.RequestException, OSError, ValueError) as error:
        if status == "Scheduled":
            node.give_up(str(error))
        else:
            say(str(error))
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
