"""Write the report of a trial on Azure: what was measured, beside what the docs claim, without secrets."""

# ruff: noqa: PLR2004 - the limits of a claim are its subject

from __future__ import annotations

import argparse
import base64
import gzip
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

Figures = Mapping[str, Any]
VERDICTS = {True: "holds", False: "**does not hold**", None: "not measured"}
_ID = re.compile(r"\b([0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.IGNORECASE)
_SECRET = re.compile(
    r"\beyJ[\w-]+(?:\.[\w-]*)*|(?i:\b(sig|sharedaccesskey|accountkey|client_secret|password|access_token))[\"']?\s*[=:]\s*[\"']?[^\s\"'&;,]+"
)
_MAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence of the docs, the figure beside it, and whether the figure agrees; None if it was not measured."""

    doc: str
    quote: str
    figure: str
    holds: Callable[[Any], bool]


CLAIMS = (
    Claim(
        doc="docs/delivery.md",
        quote="report 1 to 2 s on Azure, at times 5 s",
        figure="cold_send_seconds",
        holds=lambda one: one["median"] <= 2 and one["p99"] <= 5,
    ),
    Claim(
        doc="docs/delivery.md",
        quote="What follows within 5 s is as fast as before",
        figure="warm_send_seconds",
        holds=lambda one: one["p99"] < one["cold_median"],
    ),
    Claim(
        doc="README.md",
        quote="it disappears after it started: it is over",
        figure="ends_on_the_bus",
        holds=lambda one: "completed" in one,
    ),
    Claim(
        doc="docs/delivery.md",
        quote="The same change has the same `id` on every retry, after every restart, and on every VM",
        figure="ids_of_one_change",
        holds=lambda one: max(one.values()) == 1,
    ),
    Claim(
        doc="docs/architecture.md",
        quote="Every VM of a group sees all events of the group",
        figure="vms_that_saw_the_event",
        holds=lambda one: one["saw"] == one["vms"],
    ),
    Claim(
        doc="docs/architecture.md",
        quote="publishes each under the same `id`: duplicate detection keeps one",
        figure="copies_on_the_bus",
        holds=lambda one: one["sent"] > one["kept"] and one["most_of_one_id"] == 1,
    ),
    Claim(
        doc="docs/delivery.md",
        quote="Event Grid does not remove duplicates",
        figure="copies_of_event_grid",
        holds=lambda one: one["most_of_one_id"] > 1,
    ),
    Claim(
        doc="docs/approving.md",
        quote="Each EventId of a command gets one receipt",
        figure="receipts",
        holds=lambda one: one == ["Accepted"],
    ),
    Claim(
        doc="infra/systemd/README.md",
        quote="**Restart**: always, after 5 seconds",
        figure="seconds_after_a_kill",
        holds=lambda one: 4.5 <= one <= 15,
    ),
    Claim(
        doc="docs/architecture.md",
        quote="nothing is lost while the disk works",
        figure="reported_losses",
        holds=lambda one: one == 0,
    ),
    Claim(
        doc="infra/bicep/README.md",
        quote="gets a token only for a request that names one (`client_id`)",
        figure="token_requests",
        holds=lambda one: set(one["named"].values()) == {200} and one["unnamed"] != 200,
    ),
    Claim(
        doc="docs/architecture.md",
        quote="1,000 a second [2]",
        figure="throttled_requests",
        holds=lambda one: one == 0,
    ),
)


def clean(text: str) -> str:
    """Shorten every id, and take out what looks like a secret or a mail address."""
    return _MAIL.sub("(mail)", _SECRET.sub("(secret)", _ID.sub(r"\1...", text)))


def figures(raw: Path) -> dict[str, Any]:
    """Compute the figures of everything that was measured; what is missing is left out."""
    found: dict[str, Any] = {}
    results = {path.stem: _unpack(path) for path in sorted(raw.glob("*.b64"))}
    if sends := results.get("sends-0"):
        cold, warm = _spread(sends["cold"]), _spread(sends["warm"])
        found["cold_send_seconds"] = cold
        found["warm_send_seconds"] = {**warm, "cold_median": cold["median"]}
    if restart := results.get("restart-2"):
        found["seconds_of_a_restart"], found["seconds_after_a_kill"] = restart["restart"], restart["kill"]
    if tokens := results.get("identity-0"):
        found["token_requests"] = tokens
    found["vms"] = [result for name, result in results.items() if name.startswith("ready-")]
    collected = {name[-1]: result["logs"] for name, result in results.items() if name.startswith("collect-")}
    if collected:
        drill = results.get("drill-0", {})
        found |= {"approve": drill.get("approve")} if drill.get("approve") else {}
        event = drill.get("notice", {}).get("EventId", "")
        found |= _arrivals(collected, event, was_killed="restart-2" in results)
    if (raw / "metrics.json").exists():
        found |= _metrics(json.loads((raw / "metrics.json").read_text()))
    return found


def _unpack(path: Path) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(path.read_text())))


def _spread(seconds: list[float]) -> dict[str, float]:
    ranked = sorted(seconds)
    p99 = ranked[min(len(ranked) - 1, int(len(ranked) * 0.99))]
    return {"median": round(median(ranked), 3), "p99": round(p99, 3), "count": len(ranked)}


def _arrivals(collected: Mapping[str, Any], event: str, *, was_killed: bool) -> dict[str, Any]:
    """Compare what the VMs sent with what arrived, and follow the redeploy."""
    hooks = {vm: logs["hook"] for vm, logs in collected.items()}
    observed = next(iter(collected.values()))
    found: dict[str, Any] = {}
    sent = Counter(one["id"] for log in hooks.values() for one in log)
    lost = {one["id"] for log in hooks.values() for one in log if one["type"] == "bridge.loss.v1"}
    if was_killed:
        found["reported_losses"] = len(lost)
    for source, figure in (("bus", "copies_on_the_bus"), ("grid", "copies_of_event_grid")):
        kept = Counter(one["id"] for one in observed[source] if one["id"] in sent)
        if kept:
            total = sum(sent[one] for one in kept)
            found[figure] = {"sent": total, "kept": sum(kept.values()), "most_of_one_id": max(kept.values())}
            missing = sorted({one["type"] for log in hooks.values() for one in log if one["id"] not in kept})
            found[f"types_missing_on_{source}"] = missing
    if not event:
        return found
    of_event = {vm: [one for one in log if one.get("EventId") == event] for vm, log in hooks.items()}
    notices = {
        vm: [one for one in log if one["type"].startswith("scheduledevent.")] for vm, log in of_event.items()
    }
    found["vms_that_saw_the_event"] = {"vms": len(hooks), "saw": sum(map(bool, notices.values()))}
    # A VM that was away saw other changes: it counts for none that it did not report itself.
    ids: dict[str, set[str]] = {}
    for log in notices.values():
        for one in log:
            ids.setdefault(one["type"].split(".")[1], set()).add(one["id"])
    found["ids_of_one_change"] = {step: len(names) for step, names in ids.items()}
    documents = {
        vm: {one["id"] for one in log if one["type"].startswith("document.")} for vm, log in hooks.items()
    }
    found["documents"] = {"of_each_vm": [len(one) for one in documents.values()]}
    found["documents"]["seen_by_all"] = len(set.intersection(*documents.values()))
    first = [one for log in notices.values() for one in log if one["type"] == "scheduledevent.scheduled.v1"]
    if first:
        found["notice"] = {
            key: first[0].get(key) for key in ("EventType", "EventSource", "Resources", "NoticeSeconds")
        }
    bus = [one for one in observed["bus"] if one.get("EventId") == event]
    found["ends_on_the_bus"] = sorted(
        {one["type"].split(".")[1] for one in bus} & {"completed", "ended", "canceled"}
    )
    receipts = [one["Outcome"] for one in bus if one["type"].startswith("approval.") and "Outcome" in one]
    if receipts:
        found["receipts"] = receipts
    found["seconds_from_change_to_arrival"] = {
        name: _delays([one for one in log if one.get("EventId") == event])
        for name, log in (("webhook", observed["hook"]), ("bus", bus), ("event_grid", observed["grid"]))
    }
    found["seconds_from_notice_to_end"] = _span(bus)
    return found


def _delays(log: list[dict[str, Any]]) -> dict[str, float]:
    """Return for each step how long its first copy took from the change to the receiver."""
    found: dict[str, float] = {}
    for one in log:
        step = one["type"].split(".")[1]
        delay = round(one["at"] - datetime.fromisoformat(one["time"]).timestamp(), 3)
        found[step] = min(delay, found.get(step, delay))
    return found


def _span(log: list[dict[str, Any]]) -> float | None:
    times = {one["type"].split(".")[1]: one["at"] for one in log}
    if "scheduled" in times and "completed" in times:
        return float(round(times["completed"] - times["scheduled"], 1))
    return None


def _metrics(given: Any) -> dict[str, Any]:
    """Sum the metrics of Azure Monitor, which has none of credits: they follow from the messages."""
    minutes: dict[str, Counter[str]] = {}
    for metric in given["value"]:
        totals = minutes.setdefault(metric["name"]["value"], Counter())
        for series in metric["timeseries"]:
            for point in series["data"]:
                totals[point["timeStamp"]] += int(point.get("total") or 0)
    sums = {name: sum(one.values()) for name, one in minutes.items()}
    messages = minutes.get("IncomingMessages", Counter()) + minutes.get("OutgoingMessages", Counter())
    return {
        **({"throttled_requests": sums["ThrottledRequests"]} if "ThrottledRequests" in sums else {}),
        "azure_monitor": sums,
        "credits_a_second_in_the_busiest_minute_at_least": round(max(messages.values(), default=0) / 60, 2),
    }


def compare(found: Figures) -> list[dict[str, Any]]:
    """Return each claim with its figure and whether it holds."""
    rows = []
    for claim in CLAIMS:
        figure = found.get(claim.figure)
        holds = None if figure is None or figure == {} else claim.holds(figure)
        rows.append(
            {"doc": claim.doc, "claim": claim.quote, "figure": claim.figure, "value": figure, "holds": holds}
        )
    return rows


def steps(raw: Path) -> list[dict[str, str]]:
    """Return how each step went."""
    path = raw / "steps.tsv"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    names = ("step", "result", "seconds", "message")
    return [dict(zip(names, line.split("\t"), strict=False)) for line in lines]


def facts(raw: Path) -> dict[str, str]:
    """Return what was tried, where and when."""
    path = raw / "facts"
    pairs = (line.partition("=") for line in path.read_text().splitlines()) if path.exists() else ()
    return {key: value for key, _, value in pairs}


def markdown(report: Mapping[str, Any]) -> str:
    """Return the report as a page."""

    def cell(value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value)
        return text.replace("|", "\\|").replace("\n", " ")

    lines = ["# A trial of imds-bridge on Azure", ""]
    lines += [f"- {key}: {value}" for key, value in report["facts"].items()]
    lines += ["", "## What the docs claim", "", "| doc | claim | measured | |", "| --- | --- | --- | --- |"]
    for row in report["claims"]:
        shown = "" if row["value"] is None else f"`{row['figure']}`: {cell(row['value'])}"
        lines.append(f"| {row['doc']} | {cell(row['claim'])} | {shown} | {VERDICTS[row['holds']]} |")
    lines += ["", "## Figures", "", "| figure | measured |", "| --- | --- |"]
    lines += [f"| {name} | {cell(value)} |" for name, value in report["figures"].items()]
    lines += ["", "## Steps", "", "| step | result | seconds | message |", "| --- | --- | --- | --- |"]
    for one in report["steps"]:
        lines.append(f"| {' | '.join(cell(value) for value in one.values())} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write report.md and report.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--raw", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    found: dict[str, Any] = {}
    faults = []
    try:
        found = figures(given.raw)
        claims = compare(found)
    except Exception as error:  # noqa: BLE001 - a report without figures still says how each step went
        claims = compare({})
        faults.append({"step": "report", "result": "failed", "seconds": "0", "message": repr(error)})
    report = {
        "facts": facts(given.raw),
        "claims": claims,
        "figures": found,
        "steps": steps(given.raw) + faults,
    }
    cleaned = json.loads(clean(json.dumps(report)))
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "report.json").write_text(json.dumps(cleaned, indent=2) + "\n")
    (given.out / "report.md").write_text(markdown(cleaned))


if __name__ == "__main__":
    main()
