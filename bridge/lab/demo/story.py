"""The story of the demo: what it says, what happens, and which events that causes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridge.lab.demo.stage import Stage

HEARTBEAT, DOCUMENT = "bridge.heartbeat", "document.changed"

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


@dataclass(frozen=True, kw_only=True)
class Step:
    """A paragraph, what is done then, and which events that causes.

    `bus` is True for a step that needs the Service Bus, False for one that takes its place without it.
    """

    text: str = ""
    act: Callable[[Stage], object] | None = None
    causes: tuple[str, ...] = ()
    bus: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """A part of the story."""

    title: str
    steps: tuple[Step, ...]


CHAPTERS = (
    Chapter(
        title="An announcement reaches everyone",
        steps=(
            Step(
                text="The processes start on the VM web-0. Its document is empty: nothing is scheduled.",
                act=lambda stage: stage.start("forward"),
                causes=(HEARTBEAT, DOCUMENT),
            ),
            Step(act=lambda stage: stage.start("listen"), causes=(HEARTBEAT,), bus=True),
            Step(
                text="Azure will move web-0 and web-1 to another host, which pauses them for some seconds: a Freeze. "
                "It announces this 15 minutes before.",
                act=lambda stage: stage.schedule("Freeze", "web-0", "web-1", notice_seconds=900),
                causes=("scheduledevent.scheduled", DOCUMENT),
            ),
            Step(
                text="The consumer can now prepare both VMs, the people on call know, and the audit log has "
                "everything, the whole document included."
            ),
        ),
    ),
    Chapter(
        title="A receiver dies, the process is killed, nothing is lost",
        steps=(
            Step(
                text="The audit log fails: it answers 503 to every request. Then Azure announces a redeploy of "
                "web-0: a new host, with an empty local disk.",
                act=lambda stage: stage.fail_audit().schedule("Redeploy", "web-0", notice_seconds=600),
                causes=("scheduledevent.scheduled", DOCUMENT),
            ),
            Step(
                text="What the audit log does not accept waits on disk. Now `kill -9` ends the process, and Azure "
                "cancels the redeploy while nothing watches.",
                act=lambda stage: stage.kill_forward().do("cancel", "Redeploy"),
            ),
            Step(
                text="The audit log works again, and the process starts again. It delivers what waited, and then "
                "publishes what it finds.",
                act=lambda stage: stage.repair_audit().start("forward"),
                causes=(
                    HEARTBEAT,
                    "imds.unreachable",
                    "imds.recovered",
                    "scheduledevent.ended",
                    DOCUMENT,
                ),
            ),
            Step(
                text="Nothing is lost, and nothing is guessed: the redeploy is `ended`, not `canceled`, because it "
                "may have happened. The time without a watch is published, too."
            ),
        ),
    ),
    Chapter(
        title="An approval over the bus; a forged one is refused",
        steps=(
            Step(
                text="Once the VMs are prepared, an approval starts the event early. `imds-bridge listen` receives "
                "commands from a queue, and a policy decides. The first is forged: signed with a wrong key.",
                act=lambda stage: stage.forge("Freeze"),
                causes=("approval.rejected",),
                bus=True,
            ),
            Step(
                text="Now the real command. Note that it releases all VMs that the event names.",
                act=lambda stage: stage.approve("Freeze"),
                causes=("approval.accepted", "scheduledevent.started", DOCUMENT),
                bus=True,
            ),
        ),
    ),
    Chapter(
        title="How the event ended",
        steps=(
            Step(
                text="Without a bus there is no approval here: the Freeze starts at its time, now.",
                act=lambda stage: stage.do("start", "Freeze"),
                causes=("scheduledevent.started", DOCUMENT),
                bus=False,
            ),
            Step(
                text="Some seconds later both VMs run on another host.",
                act=lambda stage: stage.do("complete", "Freeze"),
                causes=("scheduledevent.completed", DOCUMENT),
            ),
            Step(
                text="It had started and is gone from the document: `completed`. Last, the processes are stopped; "
                "each delivers what waits and publishes a heartbeat.",
                act=lambda stage: stage.stop("forward"),
                causes=(HEARTBEAT,),
            ),
            Step(act=lambda stage: stage.stop("listen"), causes=(HEARTBEAT,), bus=True),
        ),
    ),
)

# The arguments of imds-bridge, and what they are for.
NEXT = (
    ("lab", "run the simulators, with a configuration to try"),
    ("lab schedule --type Reboot", "in another terminal: announce an event"),
    ("forward", "on an Azure VM: print every change as JSON"),
    ("check --config config.toml", "try your configuration"),
    ("demo --console", "show a fleet of 60 simulated VMs on one web page"),
)


def chapters(*, with_bus: bool) -> list[Chapter]:
    """Return the chapters with the steps that are played with or without a Service Bus."""
    all_chapters = [
        replace(one, steps=tuple(step for step in one.steps if step.bus in (None, with_bus)))
        for one in CHAPTERS
    ]
    return [one for one in all_chapters if one.steps]


def legend(*, with_bus: bool) -> dict[str, str]:
    """Return the words of the left column, and what each means."""
    return LEGEND if with_bus else LEGEND_WITHOUT_BUS


def expected_events(*, with_bus: bool) -> Counter[str]:
    """Count the events of the whole story by type."""
    return Counter(name for one in chapters(with_bus=with_bus) for step in one.steps for name in step.causes)
