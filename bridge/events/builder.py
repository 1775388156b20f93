"""Build CloudEvents: their ids, attributes and data.

The ids are part of the contract: the same change has the same id on every retry, after every restart, and on every VM
that saw the same documents.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from hashlib import sha256
from typing import Literal
from urllib.parse import quote
from uuid import UUID, uuid5

from bridge.contract.types import schema_id, type_of
from bridge.events.model import CloudEvent
from bridge.imds.diff import Change
from bridge.imds.document import Document, ScheduledEvent, fold_name
from bridge.imds.instance import Vm, approval_session
from bridge.runtime.json import Json
from bridge.runtime.time import iso_utc

NAMESPACE = UUID("6f0f3f4e-6f7b-5d59-9d0e-1d2f0a3c7a51")

# EventStatus of an event that is gone; Microsoft's preview of Event Grid uses the same values.
END_STATUS = {"completed": "Completed", "canceled": "Canceled", "ended": "Ended"}
# Why there was no usable answer of IMDS for a while.
GapCause = Literal["NoAnswer", "NotPolled", "Restart"]


@dataclass(frozen=True, kw_only=True)
class Reporter:
    """Builds the events of one process on one VM.

    Args:
        name: the VM's name, or the host's while that is unknown.
        role: the process; `{name}/{role}` is the attribute `reporter`.
        epoch: the id of the run of the process in which `reporterseq` is counted.
        at: when what is reported was seen, or has happened.
        next_number: counts one of the VM's own events; returns its `reporterseq`.
        vm: who the VM is; None while unknown.
        group_source: replaces the source of scheduledevents.
        vm_source: replaces the source of the VM's own events.
        session: the template of the approvals' session ids.
    """

    name: str
    role: str
    epoch: str
    at: datetime
    next_number: Callable[[], int]
    vm: Vm | None = None
    group_source: str = ""
    vm_source: str = ""
    session: str = ""

    def scheduled_event(self, change: Change, *, seen_before: int, incarnation: int | None) -> CloudEvent:
        """Build the event that reports a change of a scheduled event.

        Args:
            change: what changed.
            seen_before: how often this VM has seen this very change before.
            incarnation: of the document that showed it.
        """
        event = change.event
        name = f"scheduledevent.{change.kind}"
        return CloudEvent(
            id=_uuid5(f"{change.fingerprint}:{seen_before}"),
            source=self._group_source,
            type=type_of(name),
            subject=event.event_id,
            time=self.at,
            dataschema=schema_id(name),
            extensions={"correlationid": event.event_id, "partitionkey": event.event_id},
            data=self._scheduled_data(change, incarnation),
        )

    def document(
        self, document: Document, *, previous: Document | None, event_ids: Sequence[str]
    ) -> CloudEvent:
        """Build the event that reports a changed document.

        Args:
            document: as it is now.
            previous: as it was before.
            event_ids: the ids of the CloudEvents that report the changes of its events.
        """
        data = {
            "Document": document.raw,
            "DocumentIncarnation": document.incarnation,
            "PreviousIncarnation": previous.incarnation if previous else None,
            "CloudEventIds": list(event_ids),
            "Unreadable": len(document.invalid_entries),
        }
        return self._own("document.changed", data, self.next_number())

    def unreachable(self, *, since: datetime | None, reason: str, cause: GapCause) -> CloudEvent:
        """Build the event that reports that IMDS cannot be reached.

        Args:
            since: the time of the last usable answer; None if there was none.
            reason: what went wrong.
            cause: of the gap.
        """
        data = {"Since": _iso(since), "Reason": reason, "Cause": cause}
        return self._own("imds.unreachable", data, self.next_number())

    def recovered(self, *, since: datetime | None, cause: GapCause) -> CloudEvent:
        """Build the event that reports that IMDS answers again: `at` is the first usable answer after the gap.

        Args:
            since: the time of the last usable answer before the gap; None if there was none.
            cause: of the gap.
        """
        data = {
            "BlindFrom": _iso(since),
            "BlindTo": iso_utc(self.at),
            "BlindSeconds": round((self.at - since).total_seconds(), 3) if since else None,
            "Cause": cause,
        }
        return self._own("imds.recovered", data, self.next_number())

    def receipt(
        self,
        *,
        outcome: str,
        key: str,
        command_id: str,
        event_id: str,
        resources: Sequence[str],
        data: Mapping[str, Json],
    ) -> CloudEvent:
        """Build the receipt that reports the result of a command for one EventId.

        Args:
            outcome: accepted, rejected or failed.
            key: the command's key, which decides about the receipt's id together with the EventId and the outcome.
            command_id: the command's id, "" if it has none.
            event_id: the EventId, "" if none could be read.
            resources: the VMs that the approval applies to.
            data: further properties of the receipt.
        """
        known = {
            "Outcome": outcome.capitalize(),
            "EventId": event_id or None,
            "Resources": [*resources],
        }
        receipt = self._own(f"approval.{outcome}", {**known, **data}, self.next_number())
        new_id = _uuid5(f"{key}:{event_id.lower()}:{outcome}")
        return _about(receipt, event_id, new_id=new_id, causationid=command_id)

    def prepared(self, event: ScheduledEvent, *, key: str, seconds: float) -> CloudEvent:
        """Build the event that reports that this VM is prepared for an event.

        Args:
            event: as it was when its program began.
            key: of the stay and the rule, which decides about the id.
            seconds: how long the program took.
        """
        data: dict[str, Json] = {
            "EventId": event.event_id,
            "EventType": event.raw.get("EventType"),
            "Resources": [*event.resources],
            "NotBeforeUtc": _iso(event.not_before),
            "DurationSeconds": round(seconds, 3),
        }
        prepared = self._own("approval.prepared", data, self.next_number())
        return _about(prepared, event.event_id, new_id=_uuid5(f"{key}:prepared"))

    def of_work(
        self,
        kind: Literal["recovered", "outofwork"],
        event: ScheduledEvent | None,
        since: datetime,
        more: Mapping[str, Json],
    ) -> CloudEvent:
        """Build the event that reports that this VM is back at work, or stays out of work.

        Args:
            kind: which of both.
            event: the last one that it was prepared for; None if that is not known.
            since: when it was taken out of work.
            more: what else `data` has: how long the program took, or the reason.
        """
        data: dict[str, Json] = {
            "EventId": event.event_id if event else None,
            "EventType": event.raw.get("EventType") if event else None,
            "Since": iso_utc(since),
            **more,
        }
        own = self._own(f"approval.{kind}", data, self.next_number())
        return _about(own, event.event_id, new_id=own.id) if event else own

    def heartbeat(
        self,
        *,
        reason: str,
        version: str,
        backlog: Mapping[str, int],
        previous: tuple[str | None, int | None] | None = None,
        event_ids: Sequence[str] = (),
        more: Mapping[str, Json] | None = None,
    ) -> CloudEvent:
        """Build the event that reports that the process is running.

        Args:
            reason: Started, Hourly or Stopping.
            version: of imds-bridge.
            backlog: how many events wait, by sink.
            previous: the epoch of the run before and its last committed number; only Started has them.
            event_ids: the ids of CloudEvents that no document event lists.
            more: properties of the process's role.
        """
        sequence = self.next_number()
        data: dict[str, Json] = {"Reason": reason, "Version": version, "LastReporterSeq": sequence}
        data |= {"Backlog": {**backlog}, **(more or {})}
        if previous:
            data["PreviousEpoch"], data["PreviousLastReporterSeq"] = previous
        if event_ids:
            data["CloudEventIds"] = [*event_ids]
        return self._own("bridge.heartbeat", data, sequence)

    def loss(
        self, *, reason: str, count: int | None, sink: str, oldest: float | None, newest: float | None
    ) -> CloudEvent:
        """Build the event that reports that events were lost.

        Args:
            reason: one of LOSS_REASONS.
            count: how many; None if that is unknown.
            sink: the only sink that lost them, "" if it is not only one.
            oldest: when the oldest was stored, in seconds since 1970; None if that is unknown.
            newest: when the newest was stored.
        """
        data = {
            "Reason": reason,
            "Count": count,
            "Sink": sink or None,
            "OldestTime": iso_utc(datetime.fromtimestamp(oldest, UTC)) if oldest else None,
            "NewestTime": iso_utc(datetime.fromtimestamp(newest, UTC)) if newest else None,
        }
        return self._own("bridge.loss", data, self.next_number())

    def test(self, *, version: str) -> CloudEvent:
        """Build an event that only tests a sink; it is not counted by `reporterseq`."""
        message = "This is a test of imds-bridge; nothing is scheduled."
        event = self._own("bridge.test", {"Message": message, "Version": version}, 0)
        return event._replace(id=_uuid5(f"{event.source}:test:{iso_utc(self.at)}"), extensions={})

    def _own(self, name: str, data: Mapping[str, Json], sequence: int) -> CloudEvent:
        """Build one of the VM's own events, which only this VM publishes and which have a gapless counter."""
        place = f"{self._vm_data['VmId']}:{self.epoch}:{sequence}"
        content = json.dumps([name, iso_utc(self.at), data], sort_keys=True)
        return CloudEvent(
            id=_uuid5(f"{place}:{sha256(content.encode()).hexdigest()}"),
            source=self.own_source,
            type=type_of(name),
            subject=self.name,
            time=self.at,
            dataschema=schema_id(name),
            extensions={
                "reporter": f"{self.name}/{self.role}",
                "reporterepoch": self.epoch,
                "reporterseq": f"{sequence:012d}",
            },
            data={**data, "Vm": self._vm_data},
        )

    def _scheduled_data(self, change: Change, incarnation: int | None) -> dict[str, Json]:
        event, before, not_before = change.event, change.previous, change.event.not_before
        data: dict[str, Json] = dict(event.raw)
        if change.kind in END_STATUS:
            data["EventStatus"] = END_STATUS[change.kind]
        data["PreviousStatus"] = before.raw.get("EventStatus") if before else None
        data["Changed"] = list(change.changed)
        data["Previous"] = {name: before.raw.get(name) for name in change.changed} if before else {}
        data["NotBeforeUtc"] = _iso(not_before)
        data["NoticeSeconds"] = round((not_before - self.at).total_seconds()) if not_before else None
        data["DocumentIncarnation"] = incarnation
        if change.kind in ("completed", "ended"):
            data["VmRebooted"] = change.vm_rebooted
        if change.kind in END_STATUS:
            data["VmIsGone"] = _vm_is_gone(change)
        if change.kind == "ended":
            data["EndReason"] = change.end_reason
        data["AffectsThisVm"] = self.affects(event)
        data["ApprovalSession"] = self._approval_session(event)
        data["Vm"] = self._vm_data
        return data

    def affects(self, event: ScheduledEvent) -> bool | None:
        """Return whether an event names this VM; None if that is unknown."""
        if not event.resources or self.vm is None or not self.vm.name:
            return None
        return fold_name(self.vm.name) in event.content["Resources"]

    def _approval_session(self, event: ScheduledEvent) -> str | None:
        """Return the session in which a command reaches the first affected VM: the same on every VM."""
        first = event.resources[0].removeprefix("_") if event.resources else self.name
        vm = replace(self.vm, name=first) if self.vm else None
        return approval_session(self.session, vm) or None

    @cached_property
    def _group_source(self) -> str:
        """The ARM id of the scale set or resource group, which VMs that see the same events share."""
        vm = self.vm
        if self.group_source or vm is None or not (vm.subscription_id and vm.resource_group):
            return self.group_source or self._vm_urn
        group = f"/subscriptions/{vm.subscription_id}/resourceGroups/{vm.resource_group}"
        scale_set = f"/providers/Microsoft.Compute/virtualMachineScaleSets/{vm.scale_set}"
        return _reference(group + (scale_set if vm.scale_set else ""))

    @cached_property
    def own_source(self) -> str:
        """The source of the VM's own events."""
        return self.vm_source or _reference(self.vm.resource_id if self.vm else "") or self._vm_urn

    @cached_property
    def _vm_urn(self) -> str:
        return f"urn:imds-bridge:vm:{quote(self.name, safe='')}"

    @cached_property
    def _vm_data(self) -> dict[str, Json]:
        vm = self.vm or Vm(name=self.name)
        return {
            "Name": vm.name,
            "VmId": vm.vm_id,
            "ResourceId": vm.resource_id,
            "Location": vm.location,
            "Zone": vm.zone,
            "ScaleSet": vm.scale_set,
            "Tags": dict(vm.tags),
        }


def _vm_is_gone(change: Change) -> bool | None:
    """Return whether an end has taken the VMs away for good; None if that is unknown."""
    kind = change.event.raw.get("EventType")
    if change.kind == "canceled" or kind in ("Freeze", "Reboot", "Redeploy"):
        return False
    return True if change.kind == "completed" and kind in ("Preempt", "Terminate") else None


def _about(own: CloudEvent, event_id: str, *, new_id: str, causationid: str = "") -> CloudEvent:
    """Return one of the VM's own events with the attributes of one about a Scheduled Event."""
    attributes = {"correlationid": event_id, "partitionkey": event_id, "causationid": causationid}
    given = {name: value for name, value in attributes.items() if value}
    return own._replace(id=new_id, subject=event_id or own.subject, extensions={**own.extensions, **given})


def _iso(instant: datetime | None) -> str | None:
    return iso_utc(instant) if instant else None


def _reference(resource_id: str) -> str:
    """Return an ARM id as a URI reference: the name of a resource group may have letters of any script."""
    return quote(resource_id, safe="/()")


def _uuid5(name: str) -> str:
    return str(uuid5(NAMESPACE, name))
