#!/usr/bin/env python3
"""Cordon and drain this node before an event, and put it back to work; for `run` and `recover` of a rule.

    drain.py drain [--force] [--cordon-only]     cordon the node, and evict its pods
    drain.py recover                             uncordon it, if a drain has cordoned it
    drain.py tell                                write what comes into a condition of the node; for an exec sink

The first two leave a mark on the node that differs each time, so that a change still on its way conflicts. What was
done is a Kubernetes Event of the node, too. DRAIN_FORCE=false takes --force away, DRAIN_CORDON_ONLY=true adds
--cordon-only, DRAIN_EXCLUDE_FROM_LOAD_BALANCERS=true labels the node. Exit codes: 0 done; 75 not done, with the
reason on standard output: the event is not approved then, and `recover` and `tell` are tried again.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar
from urllib.parse import quote

import requests
from requests.adapters import HTTPAdapter

T = TypeVar("T")
Json = dict[str, Any]

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MARKS = "drain.imdsbridge.io/"  # also those of the version before, one for each event
MARK, CORDONED, RECOVERED = MARKS + "node", "cordoned", "recovered"  # with the time
FAILED = 75
PAUSE_SECONDS = 2.0
ANSWER_SECONDS = 10.0
LAST_SECONDS = 2.0  # for the Kubernetes Event: after SIGTERM there are 5 s
AT_ONCE = 16  # evictions
GRACE_SECONDS = 30.0  # of a pod that does not say its own
SPARE_SECONDS = 3.0  # before the start: a preStop hook that is cut short leaves the pod 2 s after SIGTERM
FORCE_SECONDS = 12.0  # before the start: with --force, what is refused still is deleted
FORCE_ANSWER_SECONDS = 0.5  # then: the deletion hardly waits for the eviction's answer
CORDON_SECONDS = 1.0  # so that the node is cordoned first where that works
LEAVING = ("Preempt", "Terminate")  # the VM goes away: its pods leave whether or not the node can be cordoned
FORCE_PART = 1 / 3  # of the seconds at the start: with --force, pods then leave without a cordon, too
LATER = (401, 408, 409, 429)  # and 5xx: the token's file and the node change, budgets and servers recover
IS_GONE = (404, 409)  # the answers to the eviction of a pod that has gone; another one may have its name
GOING = ("terminating", "gone")
# What the API server itself says of a right; a webhook's text begins with the webhook, and it may change its mind.
NO_RIGHT = re.compile(r'403 \S+( "[^"]*")? is forbidden: User "[^"]*" cannot \w+ resource "')
REASON_CHARACTERS = 1000  # of the 1,024 of a Kubernetes Event
CONDITION = "ScheduledMaintenance"
SAID = ("EventId", "EventStatus", "NotBefore", "EventSource")  # in its message
EXCLUDE = "node.kubernetes.io/exclude-from-external-load-balancers"
MANAGER = "imds-bridge"  # of what is changed here, for the API server; the value of the label, too


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
        self._session.headers["User-Agent"] = MANAGER
        self._session.mount("https://", HTTPAdapter(pool_maxsize=AT_ONCE))

    def call(
        self, method: str, path: str, body: Json | None = None, seconds: float = ANSWER_SECONDS, **query: str
    ) -> Json:
        """Return the answer; the token is read each time, since the kubelet replaces it."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        if path.endswith("/status"):  # only this one keeps the other conditions, which are the kubelet's
            kind = "application/strategic-merge-patch+json"
        token = (self._folder / "token").read_text(encoding="ascii").strip()
        answer = self._session.request(
            *(method, self._address + path),
            params=query,
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
    """The node of this pod."""

    def __init__(self, cluster: Cluster, name: str, *, must_force: bool, excludes: bool, note: str) -> None:
        self._cluster = cluster
        self._name = self._uid = name
        self._path = f"/api/v1/nodes/{quote(name, safe='')}"
        self._event_id = os.environ.get("IMDS_BRIDGE_EVENT_ID", "")
        self._must_force = must_force
        self._excludes = excludes
        self._note = note  # which variable has restricted it
        self._no_right = ""  # to delete pods: what the API server says
        self._asked: set[str] = set()
        self._reasons: dict[str, str] = {}  # why pods, by namespace and name, are still here

    def drain(self, *, cordon_only: bool) -> None:
        """Cordon the node, evict its pods, and return when they are gone.

        Raises:
            NotCordoned: they are gone, but others may have come.
        """
        cordon = Background(lambda: keep_trying(self._cordon))
        is_leaving = os.environ.get("IMDS_BRIDGE_EVENT_TYPE") in LEAVING and not cordon_only
        seconds = seconds_left() * (1 - FORCE_PART) if self._must_force and not cordon_only else math.inf
        force_at = time.monotonic() + seconds
        is_cordoned = cordon.wait(CORDON_SECONDS if is_leaving else seconds)
        if not is_cordoned and not is_leaving:
            if math.isinf(seconds):
                cordon.raise_error()
            time.sleep(max(0.0, force_at - time.monotonic()))  # it was refused before
        if not is_cordoned:
            say(f"{self._name} is not cordoned yet: pods are asked to leave without that")
        if cordon_only:
            say(f"{self._name} is cordoned; no pod is evicted{self._note}")
            done = f"Cordoned only, for event {self._event_id}; no pod is evicted{self._note}"
            self.tell("Normal", "Cordoned", done)
            return
        pods = keep_trying(self._pods)
        first = {pod["metadata"]["uid"] for pod in pods}
        self._reasons = {_name(pod): "not asked to leave yet" for pod in pods}
        told: set[str] = set()
        while pods:
            in_parallel(self._evict, pods)
            if (refused := self._still_here(but=GOING)) and "EvictionRefused" not in told:
                told.add("EvictionRefused")
                self.tell("Warning", "EvictionRefused", f"It is asked for again: {refused}")
            if self._no_right and "DeletionRefused" not in told:
                told.add("DeletionRefused")
                say(f"{self._no_right}; evictions go on")
                self.tell("Warning", "DeletionRefused", f"Evictions go on: {self._no_right}")
            time.sleep(PAUSE_SECONDS)
            pods = [pod for pod in keep_trying(self._pods) if pod["metadata"]["uid"] in first]
            self._reasons = {_name(pod): self._reasons[_name(pod)] for pod in pods}
        is_cordoned = cordon.wait(PAUSE_SECONDS)
        cordon.raise_error()
        if not is_cordoned:
            raise NotCordoned(f"{self._name} is not cordoned: other pods may have come")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is done
        left = f"pods that left: {len(first)}{self._note}"
        say(f"{self._name} is drained; {left}")
        self.tell("Normal", "Drained", f"Drained for event {self._event_id}; {left}")

    def give_up(self, reason: str) -> None:
        """Say why the node is not drained, what was asked for, and which pods are left."""
        asked = (
            f"evictions were asked for: {len(self._asked)}" if self._asked else "no eviction was asked for"
        )
        left = (f"; {self._still_here()}" if self._reasons else "") + self._note
        say(f"{reason}; {asked}{left}")
        self.tell("Warning", "NotDrained", f"Event {self._event_id}: {reason}; {asked}{left}")

    def recover(self) -> None:
        """Uncordon the node if a drain has cordoned it; change its mark in any case."""
        while True:
            try:
                node = self._read()
                self._patch(node, _recovered(node))
                break
            except Refused as refused:
                if refused.code == requests.codes.not_found:
                    say(f"{self._name} is no node of the cluster any more: there is nothing to uncordon")
                    return
                if refused.code != requests.codes.conflict:
                    raise
            time.sleep(PAUSE_SECONDS)
        if is_cordoned_by_drain(node):
            say(f"{self._name} is uncordoned")
            self.tell("Normal", "Uncordoned", "No event is left that it was cordoned for")
            return
        why = f"no drain has cordoned {self._name}, or its mark was removed"
        if others := others_that_cordoned(node):
            why = f"{self._name} was cordoned by {', '.join(others)} after the drain, or without one"
        is_cordoned = node["spec"].get("unschedulable", False)
        kept = "it is still unschedulable, and `kubectl uncordon` puts it back"
        say(f"{why}: {kept if is_cordoned else 'it stays as it is'}")

    def tell_condition(self, event: Json) -> None:
        """Write a `document.changed` into the condition; whoever wrote the others keeps them."""
        now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        new = {"type": CONDITION, **condition_of(event), "lastHeartbeatTime": now}
        found = self._read().get("status", {}).get("conditions", ())
        old = next((one for one in found if one["type"] == CONDITION), {"status": ""})
        new["lastTransitionTime"] = old["lastTransitionTime"] if old["status"] == new["status"] else now
        self._cluster.call("PATCH", f"{self._path}/status", {"status": {"conditions": [new]}})
        say(f"{CONDITION} of {self._name} is {new['status']}: {new['message']}")

    def tell(self, kind: str, reason: str, message: str) -> None:
        """Write a Kubernetes Event of the node, which `kubectl describe node` shows; a failure is only printed."""
        at = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        body: Json = {"apiVersion": "v1", "kind": "Event", "type": kind, "reason": reason, "count": 1}
        # "default" is the namespace of what is told of objects without one.
        body["metadata"] = {"generateName": "imds-bridge-", "namespace": "default"}
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

    def _read(self) -> Json:
        node = self._cluster.call("GET", self._path)
        self._uid = node["metadata"].get("uid", self._name)
        return node

    def _patch(self, node: Json, patch: Json) -> None:
        """Change the node; a conflict is refused if anybody has changed it since it was read."""
        version = node["metadata"]["resourceVersion"]
        self._cluster.call(
            "PATCH", self._path, {**patch, "metadata": {**patch["metadata"], "resourceVersion": version}}
        )

    def _cordon(self) -> None:
        try:
            node = self._read()
        except Refused as refused:
            if refused.code != requests.codes.not_found:
                raise
            say(f"{self._name} is no node of the cluster any more: no pod can come")
            return
        labels = node["metadata"].get("labels", {})
        metadata = {"labels": {EXCLUDE: labels.get(EXCLUDE, MANAGER)} if self._excludes else {}}
        if not node["spec"].get("unschedulable", False) or is_cordoned_by_drain(node):
            self._patch(
                node, {"metadata": metadata | _marked(node, CORDONED), "spec": {"unschedulable": True}}
            )
            return
        say(f"{self._name} was cordoned already, and not by a drain: it will not be uncordoned")
        if self._excludes:
            self._patch(node, {"metadata": metadata})

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
        path = f"/api/v1/namespaces/{quote(meta['namespace'])}/pods/{quote(meta['name'])}"
        left, grace = seconds_left(), pod["spec"].get("terminationGracePeriodSeconds", GRACE_SECONDS)
        options: Json = {"preconditions": {"uid": meta["uid"]}}
        if left < grace + SPARE_SECONDS:
            options["gracePeriodSeconds"] = max(1, int(left - SPARE_SECONDS))
        if name not in self._asked:
            self._asked.add(name)
            self._reasons[name] = "asked to leave, not answered yet"
        body: Json = {"apiVersion": "policy/v1", "kind": "Eviction", "deleteOptions": options}
        body["metadata"] = {"name": meta["name"], "namespace": meta["namespace"]}
        seconds = ANSWER_SECONDS
        if self._must_force:
            seconds = min(seconds, max(FORCE_ANSWER_SECONDS, left - FORCE_SECONDS))
        reason = self._ask("POST", f"{path}/eviction", body, seconds)
        is_last = self._must_force and seconds_left() < FORCE_SECONDS and not self._no_right
        if is_last and reason not in GOING:
            body = {"apiVersion": "v1", "kind": "DeleteOptions", **options}
            reason = self._ask("DELETE", path, body, LAST_SECONDS) or reason
        self._reasons[name] = reason

    def _ask(self, method: str, path: str, body: Json, seconds: float) -> str:
        """Ask for the end of a pod; return why it is still here, "" if the right to delete pods is missing."""
        try:
            self._cluster.call(method, path, body, seconds=seconds)
        except Refused as refused:
            if refused.code == requests.codes.forbidden and refused.is_final:
                if method != "DELETE":
                    raise
                self._no_right = str(refused)
                return ""
            return "gone" if refused.code in IS_GONE else str(refused)
        except requests.RequestException as error:
            return str(error)
        return "terminating"


class NotCordoned(Exception):
    """The pods have left, but the node could not be cordoned."""


class Background:
    """A step in a thread that does not delay the end of the program."""

    def __init__(self, step: Callable[[], None]) -> None:
        self._step, self._error = step, deque[Exception]()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Return whether it has ended within the seconds, and without an error."""
        self._thread.join(None if math.isinf(seconds) else max(0.0, seconds))
        return not self._thread.is_alive() and not self._error

    def raise_error(self) -> None:
        """Raise the error that has ended it."""
        if self._error:
            raise self._error[0]

    def _run(self) -> None:
        try:
            self._step()
        except Exception as error:  # noqa: BLE001 - whoever waits raises it
            self._error.append(error)


def in_parallel(step: Callable[[T], None], items: Sequence[T]) -> None:
    """Call the step for each item, for some at once; raise the first error when all are done.

    The threads do not delay the end of the program.
    """
    left = iter(items)

    def work() -> None:
        for item in left:  # each goes to one thread
            step(item)

    workers = [Background(work) for _ in items[:AT_ONCE]]
    for one in workers:
        one.wait(math.inf)
    for one in workers:
        one.raise_error()


def keep_trying(step: Callable[[], T]) -> T:
    """Return what the step returns; try again while the API server is down or overloaded."""
    while True:
        try:
            return step()
        except (Refused, requests.RequestException) as error:
            if isinstance(error, Refused) and error.is_final:
                raise
            say(str(error))
        time.sleep(PAUSE_SECONDS)


def is_cordoned_by_drain(node: Json) -> bool:
    """Return whether a drain has cordoned the node, and nobody else since: a mark says so, also an older one."""
    is_marked = any(not value.startswith(RECOVERED) for value in _marks(node).values())
    return is_marked and not others_that_cordoned(node)


def others_that_cordoned(node: Json) -> list[str]:
    """Return who else has set `unschedulable`: whoever sets it to what it is already does not count."""
    fields = [one for one in node["metadata"].get("managedFields", ()) if one.get("manager") != MANAGER]
    return [one["manager"] for one in fields if "f:unschedulable" in one["fieldsV1"].get("f:spec", {})]


def condition_of(event: Json) -> Json:
    """Return status, reason and message of the condition, from a `document.changed`."""
    data = event.get("data", {})
    if "Document" not in data:
        raise ValueError(
            "expected on standard input: an event document.changed, from an exec sink of that type"
        )
    own = str(data.get("Vm", {}).get("Name") or "").removeprefix("_").casefold()
    events = [one for one in data["Document"].get("Events", ()) if isinstance(one, dict) and _names(one, own)]
    if not events:
        unreadable = data.get("Unreadable", 0)
        message = f"Scheduled events of this VM: 0; that cannot be read: {unreadable}"
        status = "Unknown" if unreadable else "False"
        return {"status": status, "reason": "NoScheduledEvent", "message": message}
    first, *more = sorted(events, key=_starts_at)
    message = ", ".join(f"{name} {first.get(name) or '-'}" for name in SAID)
    message = f"{message}; later: {len(more)}"[:REASON_CHARACTERS]
    return {"status": "True", "reason": str(first.get("EventType", "Unknown")), "message": message}


def _names(event: Json, own: str) -> bool:
    """Return whether an event names the VM; it may if either is not known."""
    given = event.get("Resources") or ()
    names = [str(one).removeprefix("_").casefold() for one in ([given] if isinstance(given, str) else given)]
    return own in names or not (own and names)


def _starts_at(event: Json) -> float:
    try:
        return parsedate_to_datetime(str(event.get("NotBefore"))).timestamp()
    except ValueError:  # it has started
        return -math.inf


def _marks(node: Json) -> dict[str, str]:
    annotations = node["metadata"].get("annotations", {})
    return {name: value for name, value in annotations.items() if name.startswith(MARKS)}


def _marked(node: Json, what: str) -> Json:
    """Return metadata with only the one mark, which is another each time."""
    return {"annotations": {**dict.fromkeys(_marks(node)), MARK: f"{what} {datetime.now(UTC).isoformat()}"}}


def _recovered(node: Json) -> Json:
    patch: Json = {"metadata": _marked(node, RECOVERED)}
    if node["metadata"].get("labels", {}).get(EXCLUDE) == MANAGER:
        patch["metadata"]["labels"] = {EXCLUDE: None}
    return {**patch, "spec": {"unschedulable": None}} if is_cordoned_by_drain(node) else patch


def seconds_left() -> float:
    """Return how much time is left until the event may start, infinitely much if nothing says when."""
    try:
        not_before = datetime.fromisoformat(os.environ.get("IMDS_BRIDGE_NOT_BEFORE", ""))
    except ValueError:
        return math.inf
    return (not_before - datetime.now(UTC)).total_seconds()


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


def _is_set(variable: str, word: str) -> bool:
    """Return whether a variable is set to its word."""
    value = os.environ.get(variable, "")
    if value not in ("", word):
        raise ValueError(f"the environment variable {variable} is {value!r}; expected: {word!r}, or unset")
    return value == word


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command says; return the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(FAILED))
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("drain", "recover", "tell"))
    parser.add_argument("--force", action="store_true", help="delete what is refused in the last 12 s")
    parser.add_argument("--cordon-only", action="store_true", help="evict nothing")
    parser.add_argument("--account", type=Path, default=SERVICE_ACCOUNT, help="of token and ca.crt: a folder")
    given = parser.parse_args(arguments)
    try:
        is_taken = _is_set("DRAIN_FORCE", "false") and given.force
        is_restricted = _is_set("DRAIN_CORDON_ONLY", "true")
        note = " (DRAIN_CORDON_ONLY=true)" if is_restricted else " (DRAIN_FORCE=false: no pod is deleted)"
        node = Node(
            *(Cluster(given.account), os.environ["NODE_NAME"]),
            must_force=given.force and not is_taken,
            excludes=_is_set("DRAIN_EXCLUDE_FROM_LOAD_BALANCERS", "true"),
            note=note if is_restricted or is_taken else "",
        )
    except (KeyError, ValueError) as error:
        missing = f"the environment variable {error} is missing: this runs in a pod as in drain.yaml"
        say(missing if isinstance(error, KeyError) else str(error))
        return FAILED
    try:
        if given.command == "recover":
            node.recover()
        elif given.command == "tell":
            node.tell_condition(json.load(sys.stdin))
        else:
            node.drain(cordon_only=is_restricted or given.cordon_only)
    except (SystemExit, Refused, NotCordoned, requests.RequestException, OSError, ValueError) as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        reason = "ended before it was done" if isinstance(error, SystemExit) else str(error)
        (node.give_up if given.command == "drain" else say)(reason)
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
