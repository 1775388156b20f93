"""The command `config`: the configuration's JSON Schema, and a check of a file without a network."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from bridge.arguments import OK, add_command
from bridge.config.loader import load
from bridge.config.models import Config
from bridge.config.sinks import alternatives
from bridge.errors import ConfigError, UsageError
from bridge.process.parts import build_sinks, sinks_of
from bridge.roles import approval_settings, programs_of, relay_settings
from bridge.runtime.program import find_fault
from bridge.runtime.text import show

# Generated from the settings.
_SCHEMA = Path(__file__).parents[1] / "config" / "schema.json"
_EPILOG = """\
Editors that know Taplo or Even Better TOML use the schema for a file whose
first line is: #:schema ./config.schema.json

examples:
  imds-bridge config schema > config.schema.json
  imds-bridge config check config.toml
"""


def configure(command: argparse.ArgumentParser) -> None:
    """Complete the parser of `config`."""
    command.epilog = _EPILOG
    actions = command.add_subparsers(metavar="ACTION", required=True)
    schema = add_command(actions, "schema", "print the JSON Schema of the configuration")
    schema.epilog = "example:\n  imds-bridge config schema > config.schema.json"
    schema.set_defaults(run=_print_schema)
    check = add_command(actions, "check", "report every error of a file, without a network")
    check.epilog = (
        "`imds-bridge check` tries what it names.\n\n"
        "examples:\n  imds-bridge config check config.toml\n"
        "  imds-bridge config check --role listen config.toml"
    )
    help_text = "also check what would end this process at its start, and the programs that it calls"
    check.add_argument("--role", choices=("forward", "listen", "relay"), help=help_text)
    check.add_argument("file", type=Path, metavar="FILE", help="the TOML file; the environment overrides it")
    check.set_defaults(run=_check)


def _print_schema(_: argparse.Namespace) -> int:
    show(*_SCHEMA.read_text(encoding="utf-8").splitlines())
    return OK


def _check(arguments: argparse.Namespace) -> int:
    config = load(arguments.file, os.environ)
    check_parts(config)
    if arguments.role:
        _check_start(config, arguments.role)
    found = [f"  warning: {text}" for _, text, _ in warnings(config)]
    show(f"{arguments.file}: the configuration is valid", *found)
    return OK


def _check_start(config: Config, role: str) -> None:
    """Check what ends a process at its start, and the programs that it calls.

    Raises:
        UsageError: its part of the configuration is missing, or a program cannot be started.
    """
    if role == "listen":
        approval_settings(config)
    if role == "relay":
        relay_settings(config)
    found = ((key, find_fault(program)) for program, key in programs_of(config, role).items())
    if faults := [f"{key}: {fault}" for key, fault in found if fault]:
        raise UsageError(f"{role}: {'; '.join(faults)}")


def check_parts(config: Config) -> None:
    """Check what only the parts know that are built from the configuration: the chat formats and the relay.

    Raises:
        ConfigError, UsageError: a template or a sink of a relay is wrong.
    """
    try:
        sinks = build_sinks({name: sink for name, sink in sinks_of(config).items() if sink.is_chat_format})
    except ConfigError as error:
        raise ConfigError(str(config.path), error.faults) from None
    if faults := [f"sinks.{name}: {sink.outdated}" for name, sink in sinks.items() if sink.outdated]:
        raise ConfigError(str(config.path), faults)
    if config.relay:
        relay_settings(config)


def warnings(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield what is accepted but hardly meant: the sink or `approvals`, the key with the reason, and a remedy."""
    for name, sink in sinks_of(config).items():
        for text in sink.warnings():
            yield name, f"sinks.{name}.{text}", "correct it, unless it is a value that Azure has added"
        if "digest_seconds" in sink.model_fields_set and not config.relay:
            text = f"sinks.{name}.digest_seconds: only a relay gathers messages, and there is no [relay]"
            yield name, text, "leave it out, or use the sink in the configuration of `imds-bridge relay`"
    for text in config.approvals.warnings() if config.approvals and listens(config) else ():
        yield "approvals", f"approvals.{text}", "change it, unless this is what you want"
    for variable in config.policy_variables if config.approvals else ():
        text = f"approvals: the environment variable {variable} sets what may be approved"
        yield "approvals", text, "set it in the configuration file, unless this is what you want"
    for part, key, event_type in _event_types(config):
        if lack := config.imds.lack(event_type):
            yield part, f"{key}: {lack}", "set a newer api_version in [imds], or leave the value out"


def listens(config: Config) -> bool:
    """Return whether it configures a listener; a console's [approvals] has no rules, and names only the bus."""
    return config.approvals is not None and (config.console is None or any(config.approvals.rules()))


def _event_types(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield each event type that a filter or a rule names, with its sink and key."""
    for name, sink in sinks_of(config).items():
        for value in alternatives(sink.where.get("EventType", ())):
            yield name, f"sinks.{name}.where.EventType", str(value)
    for key, rule in config.approvals.rules() if config.approvals else ():
        for value in rule.event_type:
            yield "approvals", f"approvals.{key}.event_type", value
