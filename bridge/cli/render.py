"""The command `render`: show exactly what a sink would send, for a sample of every event type."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any

from bridge.arguments import OK, add_flag, add_text, complete, load_config
from bridge.config.models import Config
from bridge.contract.types import type_of
from bridge.errors import Rejected, UsageError
from bridge.formats.samples import samples
from bridge.process.parts import build_sinks, filter_of, sinks_of
from bridge.runtime.text import show
from bridge.sinks.base import RequestPreview

_EPILOG = """\
Sends nothing. Secrets are shown as ***.

examples:
  imds-bridge render --sink ops
  imds-bridge render --sink ops --type scheduledevent.scheduled --indent
  imds-bridge render --sink ops --type 'approval.*'
  imds-bridge render --sink chat --digest
"""


def configure(command: argparse.ArgumentParser) -> None:
    """Complete the parser of `render`."""
    complete(command, _run, epilog=_EPILOG)
    add_text(command, "--sink", "NAME", "which sink (optional if there is only one)")
    add_text(command, "--type", "TYPE", "only these types; * matches anything (default: all)")
    add_flag(command, "--indent", "indent the JSON")
    add_flag(command, "--digest", "show all as one message, as `relay` gathers them")


def _run(arguments: argparse.Namespace) -> int:
    config, at = load_config(arguments), datetime.now(UTC)
    more = {"indent": arguments.indent, "digest": arguments.digest}
    for text in render(config, arguments.sink, arguments.type, at=at, **more):
        show(*text.split("\n"))
    return OK


def render(
    config: Config, sink: str, pattern: str, *, indent: bool, at: datetime, digest: bool = False
) -> Iterator[str]:
    """Write each request with a heading above it.

    Args:
        config: the configuration with the sink.
        sink: its name; "" if there is only one.
        pattern: the types to show, whole, with `*`, or short such as scheduledevent.started; "" for all.
        indent: whether to indent the JSON, instead of showing it byte for byte.
        at: the time of the samples.
        digest: whether to show one message for all instead of one for each.

    Raises:
        UsageError: the sink or the type is unknown, or the sink has no digest.
    """
    settings = sinks_of(config)
    name = sink or next(iter(settings))
    if name not in settings or (not sink and len(settings) > 1):
        raise UsageError(f"render: given --sink {sink or 'nothing'}, expected one of {', '.join(settings)}")
    events = samples(at)
    chosen = [event for event in events if _matches(event.type, pattern)]
    if not chosen:
        known = ", ".join(event.type for event in events)
        raise UsageError(f"render: given --type {pattern}, expected one of {known}")
    if digest and settings[name].gather_seconds is None:
        raise UsageError(f"render: given --digest, expected a sink for Teams or Slack instead of {name}")
    wanted = filter_of(settings[name], "relay" if digest else "forward")
    built: Any
    with closing(build_sinks({name: settings[name]})[name]) as built:
        if digest and (gathered := [event for event in chosen if wanted.matches(event)]):
            yield f"# a digest\n{_text(built.preview(*gathered), indent=indent)}\n"
        for event in () if digest else chosen:
            if refusal := wanted.refusal(event):
                yield f"# {event.type}: not sent, because of sinks.{name}.{': '.join(refusal)}\n"
                continue
            try:
                yield f"# {event.type}\n{_text(built.preview(event), indent=indent)}\n"
            except Rejected as error:
                yield f"# {event.type}: dead-lettered, {error}\n"


def _matches(event_type: str, pattern: str) -> bool:
    return not pattern or any(fnmatchcase(event_type, known) for known in (pattern, type_of(pattern)))


def _text(request: RequestPreview, *, indent: bool) -> str:
    body = request.body.decode()
    if indent and body:
        body = json.dumps(json.loads(body), indent=2, ensure_ascii=False)
    return "\n".join([*request.head, *([""] if request.head else []), body])
