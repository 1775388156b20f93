"""Tell once when a VM will be down, and once when it is back: `told` is what was told, by EventId."""

from typing import Any

# How an event can end for the VM. If it has several ends, a later one in this list corrects an earlier one.
ENDS = ["lost", "removed", "canceled", "ended", "completed"]


def affects(resources: Any, vm: str) -> bool | None:
    """Return whether the VM is named; None if that is unknown."""
    names = resources if isinstance(resources, list) else [resources]
    if vm.lower() in (name.removeprefix("_").lower() for name in names if isinstance(name, str)):
        return True
    return False if names and all(isinstance(name, str) and name for name in names) else None


def tell(told: dict[str, Any], vm: str, event: dict[str, Any]) -> str | None:
    """Return the line to tell about a scheduledevent, None if there is none. Tell it, then store `told`."""
    data, kind, key = event["data"], event["type"].split(".")[3], event["correlationid"].lower()
    if kind == "advised" or data.get("EndReason") == "Advisory":
        return None  # an early warning: nothing is scheduled
    copy, affected = f"{event['source']} {event['id']}".lower(), affects(data.get("Resources"), vm)
    new = {
        "seen": [],
        "time": "",
        "type": data.get("EventType"),
        "down": False,
        "at": None,
        "end": None,
        "again": "",
    }
    known = told.get(key, new)
    if copy in known["seen"] or (key not in told and affected is False):
        return None
    told[key] = known
    known["seen"].append(copy)
    is_end, before = affected is False or kind in ENDS, known["time"]
    known["time"] = max(event["time"], before)
    if event["time"] < (known.get("again", "") if is_end else before):
        return None  # old news, or the end of the story before
    if is_end:
        return over(told, vm, key, "removed" if affected is False else kind, is_gone=data.get("VmIsGone"))
    if known["end"]:  # it came back: a new story
        known.update(type=new["type"], down=False, at=None, end=None, again=event["time"])
    is_started, at = data.get("EventStatus") == "Started", data["NotBeforeUtc"] or known["at"]
    was_down, is_moved = known["down"], not is_started and at != known["at"]
    known.update(down=True, at=at)
    when = "now" if is_started else f"at {at}" if at else "at an unknown time"
    line = f"{'MOVED' if was_down else 'DOWN'} {vm} {when}: {known['type']} {key}"
    return line + ("" if affected else " (perhaps)") if is_moved or not was_down else None


def over(told: dict[str, Any], vm: str, key: str, end: str, *, is_gone: bool | None = None) -> str | None:
    """Return the line to tell about an end."""
    known, before = told[key], told[key]["end"]
    if before and ENDS.index(end) <= ENDS.index(before):
        return None
    known["end"] = end
    others = sum(one["down"] and not one["end"] for one in told.values())
    word = "CORRECTION" if before else "LOST" if end == "lost" else "GONE" if is_gone else "BACK"
    line = f"{word} {vm}: {known['type']} {key} {end}" + (
        f", but {others} other event(s) are not over" if others else ""
    )
    return line if known["down"] or end in ("ended", "completed") else None


def lost(told: dict[str, Any], vm: str, before: str) -> list[str]:
    """Return lines about events that have no end, and neither news nor a NotBefore since then, a day ago."""
    late = [key for key, one in told.items() if not one["end"] and max(one["time"], one["at"] or "") < before]
    return [line for key in late if (line := over(told, vm, key, "lost"))]
