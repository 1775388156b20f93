"""The story of the demo: what it says, what happens, which events that causes; it is played and judged here."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import NoReturn

from bridge.lab.demo.listeners import DOCUMENT, HEARTBEAT
from bridge.lab.demo.narrator import Narrator
from bridge.lab.demo.stage import NotArrived, Stage, find_faults
from bridge.runtime.text import show
from bridge.runtime.threads import STOP_SIGNALS

INTRODUCTION = """\
A Scheduled Event is Azure's notice that it will soon freeze, reboot, redeploy, preempt or delete a VM: what, \
which VMs, and not before when. Only the VMs concerned can read it, from their metadata service (IMDS).

imds-bridge runs on the VM, asks IMDS every second and publishes every change as a CloudEvent. Three listeners get \
them here: a program behind Service Bus and Event Grid, a chat channel, and an audit log.

IMDS and the listeners are simulated on 127.0.0.1; the processes and commands are real."""
LEGEND = {
    "IMDS": "what Azure shows to the VM now",
    "CONSUMER": "an event has arrived over Service Bus and over Event Grid",
    "CHAT": "a message in the chat channel",
    "AUDIT": "the types of the events that have arrived at the audit log",
    "PROCESS": "a process of imds-bridge has started, was killed, or has ended",
    "COMMAND": "a command and its output",
}
LEGEND_WITHOUT_BUS = {word: text for word, text in LEGEND.items() if word != "COMMAND"} | {
    "CONSUMER": "an event has arrived over Event Grid"
}
# The arguments of imds-bridge, and what they are for.
NEXT = (
    ("lab", "run the simulators, with a configuration to try"),
    ("lab schedule --type Reboot", "in another terminal: announce an event"),
    ("forward", "on an Azure VM: print every change as JSON"),
    ("check --config config.toml", "try your configuration"),
    ("demo --console", "show a fleet of 60 simulated VMs on one web page"),
)


def demonstrate(*, with_bus: bool, fast: bool) -> int:
    """Play the story; return 0 only if everything arrived.

    Args:
        with_bus: whether to simulate a Service Bus and to approve over it.
        fast: whether to leave out the pauses.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, _interrupt)
    try:
        with tempfile.TemporaryDirectory(prefix="imds-bridge-demo-") as folder, ExitStack() as stack:
            return _demonstrate(stack, Path(folder), Narrator(fast=fast), with_bus=with_bus)
    except KeyboardInterrupt:
        show("demo: stopped", stream=sys.stderr)
        return 1


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    """End the demo; a second signal must not keep it from ending its processes."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _demonstrate(stack: ExitStack, folder: Path, narrate: Narrator, *, with_bus: bool) -> int:
    bus = None
    if with_bus:
        from bridge.lab.demo.bus import DemoBus  # noqa: PLC0415 - it needs the extra `lab`

        bus = DemoBus(stack)
    stage = Stage(stack, folder, narrate, bus)
    narrate.paragraphs(f"{INTRODUCTION}\n\nThe left column:")
    narrate.table(LEGEND if with_bus else LEGEND_WITHOUT_BUS)
    try:
        play(stage, with_bus=with_bus)
    except NotArrived as error:
        stage.faults.append(str(error))
    return _conclude(stage, narrate)


def _conclude(stage: Stage, narrate: Narrator) -> int:
    """Print what has arrived, and what to do next or what is wrong; return the exit code."""
    published, arrived = stage.published(), stage.listeners.arrived()
    faults = [*stage.faults, *find_faults(stage.expected, published, arrived)]
    if faults:
        show(*stage.logs(), stream=sys.stderr)
        show("", f"demo: FAILED, {'; '.join(faults)}")
        return 1
    received = ", ".join(f"{len(ids)} by {place}" for place, ids in arrived.items())
    narrate.paragraphs(
        f"{len(published)} events were published, and received: {received}. The chat channel has "
        f"{len(stage.listeners.chat())} messages.\n\nWhat to do next:"
    )
    for arguments, text in NEXT:
        show(f"  {_command()} {arguments}", f"      {text}")
    show("", f"demo: ok, {len(published)} published, 0 lost")
    return 0


def _command() -> str:
    """Return how this program is called here."""
    path = Path(sys.argv[0])
    is_found = path.name != "imds-bridge" or shutil.which(path.name)
    return "imds-bridge" if is_found else os.path.relpath(path)


def play(stage: Stage, *, with_bus: bool) -> None:
    """Play all chapters, with or without a Service Bus; what `expect` is called with is what all before causes."""
    announce(stage, with_bus=with_bus)
    fail(stage)
    if with_bus:
        approve(stage)
    end(stage, with_bus=with_bus)


def announce(stage: Stage, *, with_bus: bool) -> None:
    """Start the processes, and announce an event."""
    stage.chapter("An announcement reaches everyone")
    stage.say("The processes start on the VM web-0. Its document is empty: nothing is scheduled.")
    stage.start("forward")
    stage.expect(HEARTBEAT, DOCUMENT)
    if with_bus:
        stage.start("listen")
        stage.expect(HEARTBEAT)
    stage.say(
        "Azure will move web-0 and web-1 to another host, which pauses them for some seconds: a Freeze. It announces "
        "this 15 minutes before."
    )
    stage.schedule("Freeze", "web-0", "web-1", notice_seconds=900)
    stage.expect("scheduledevent.scheduled", DOCUMENT)
    stage.say(
        "The consumer can now prepare both VMs, the people on call know, and the audit log has everything, the whole "
        "document included."
    )


def fail(stage: Stage) -> None:
    """Let a receiver fail and kill the forwarder; then repair both."""
    stage.chapter("A receiver dies, the process is killed, nothing is lost")
    stage.say(
        "The audit log fails: it answers 503 to every request. Then Azure announces a redeploy of web-0: a new host, "
        "with an empty local disk."
    )
    stage.fail_audit()
    stage.schedule("Redeploy", "web-0", notice_seconds=600)
    stage.expect("scheduledevent.scheduled", DOCUMENT)
    stage.say(
        "What the audit log does not accept waits on disk. Now `kill -9` ends the process, and Azure cancels the "
        "redeploy while nothing watches."
    )
    stage.kill_forward()
    stage.do("cancel", "Redeploy")
    stage.expect()
    stage.say(
        "The audit log works again, and the process starts again. It delivers what waited, and then publishes what "
        "it finds."
    )
    stage.repair_audit()
    stage.start("forward")
    stage.expect(HEARTBEAT, "imds.unreachable", "imds.recovered", "scheduledevent.ended", DOCUMENT)
    stage.say(
        "Nothing is lost, and nothing is guessed: the redeploy is `ended`, not `canceled`, because it may have "
        "happened. The time without a watch is published, too."
    )


def approve(stage: Stage) -> None:
    """Send a forged approval, and a real one."""
    stage.chapter("An approval over the bus; a forged one is refused")
    stage.say(
        "Once the VMs are prepared, an approval starts the event early. `imds-bridge listen` receives commands from "
        "a queue, and a policy decides. The first is forged: signed with a wrong key."
    )
    stage.forge("Freeze")
    stage.expect("approval.rejected")
    stage.say("Now the real command. Note that it releases all VMs that the event names.")
    stage.approve("Freeze")
    stage.expect("approval.accepted", "scheduledevent.started", DOCUMENT)


def end(stage: Stage, *, with_bus: bool) -> None:
    """Let the event end, and stop the processes."""
    stage.chapter("How the event ended")
    if not with_bus:
        stage.say("Without a bus there is no approval here: the Freeze starts at its time, now.")
        stage.do("start", "Freeze")
        stage.expect("scheduledevent.started", DOCUMENT)
    stage.say("Some seconds later both VMs run on another host.")
    stage.do("complete", "Freeze")
    stage.expect("scheduledevent.completed", DOCUMENT)
    stage.say(
        "It had started and is gone from the document: `completed`. Last, the processes are stopped; each delivers "
        "what waits and publishes a heartbeat."
    )
    for role in ("forward", "listen") if with_bus else ("forward",):
        stage.stop(role)
        stage.expect(HEARTBEAT)
