"""The real `imds-bridge forward` as its own process: how it starts, runs and ends."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox
from tests.support.process import LIMIT_SECONDS, Forward, environment, read_outbox, run, wait_until

TYPES = [f"io.imdsbridge.{name}.*" for name in ("scheduledevent", "document", "imds")]
SCHEDULED = "io.imdsbridge.scheduledevent.scheduled.v1"


def webhook(inbox: Inbox, **more: Any) -> dict[str, Any]:
    """Return a sink's settings: it takes all that documents bring about, and no heartbeats."""
    return {"kind": "webhook", "url": inbox.url, "types": TYPES, "from_start": True, **more}


def settings(imds: ImdsLab, sinks: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    given = {"endpoint": imds.url("web-0"), "poll_seconds": 0.2}
    return {"imds": given, "stop_seconds": LIMIT_SECONDS, "sinks": sinks, **more}


def types_at(inbox: Inbox) -> list[str]:
    return [event["type"] for event in inbox.events()]


def schedule(imds: ImdsLab) -> str:
    return imds.schedule(event_type="Reboot", resources=["web-0"], notice_seconds=86_400)


def wait_for_polls(imds: ImdsLab, count: int = 2) -> None:
    """Wait until so many requests have come from now on."""
    before = len(imds.requests())
    imds.wait_for(lambda: len(imds.requests()) >= before + count, timeout=LIMIT_SECONDS)


def test_an_event_that_appears_just_before_the_signal_is_delivered(
    imds: ImdsLab, inbox: Inbox, tmp_path: Path
) -> None:
    slowly = {"endpoint": imds.url("web-0"), "poll_seconds": 60}  # the last poll comes at once all the same
    with Forward(tmp_path, {**settings(imds, {"inbox": webhook(inbox)}), "imds": slowly}) as forward:
        forward.wait_for_status(lambda status: status["sinks"]["inbox"]["backlog"] == 0)
        inbox.wait_for(1, LIMIT_SECONDS)
        schedule(imds)
        assert forward.stop() == 0, forward
    assert SCHEDULED in types_at(inbox)


def test_a_dry_run_of_listen_publishes_a_receipt_and_approves_nothing(
    imds: ImdsLab, inbox: Inbox, tmp_path: Path
) -> None:
    sinks = {"inbox": {**webhook(inbox), "types": ["io.imdsbridge.approval.*"]}}
    schedule(imds)
    given = settings(imds, sinks, approvals={"auto": [{}]})
    with Forward(tmp_path, given, role="listen", options=["--dry-run"]) as listen:
        inbox.wait_for(1, LIMIT_SECONDS)
        assert listen.stop() == 0, listen
    assert [(one["data"]["Outcome"], one["data"]["DryRun"]) for one in inbox.events()] == [("Accepted", True)]
    assert imds.approvals == []


def test_a_sink_that_hangs_at_the_stop_does_not_keep_the_process(
    imds: ImdsLab, inbox: Inbox, tmp_path: Path
) -> None:
    inbox.fault("timeout", count=None)
    sinks = {"inbox": webhook(inbox, timeout_seconds=60)}
    with Forward(tmp_path, settings(imds, sinks, stop_seconds=1)) as forward:
        inbox.wait_for(lambda: inbox.received, LIMIT_SECONDS)
        assert forward.stop() == 0, forward
        assert forward.status()["running"] is False
        assert forward.wait_for_log("stopped with events waiting")["waiting"] == {"inbox": 1}


def test_a_closed_stdout_pipe_does_not_end_the_process(imds: ImdsLab, tmp_path: Path) -> None:
    with Forward(tmp_path, settings(imds, {}, stop_seconds=0.5), stdout=subprocess.PIPE) as forward:
        assert forward.process is not None
        assert forward.process.stdout is not None
        json.loads(forward.process.stdout.readline())
        forward.process.stdout.close()
        schedule(imds)
        forward.wait_for_log("standard output cannot be written")
        assert forward.stop() == 0, forward


def test_a_process_without_standard_output_goes_on(imds: ImdsLab, tmp_path: Path) -> None:
    forward = Forward(tmp_path, settings(imds, {}, stop_seconds=0.5))
    forward._command[:0] = ["/bin/sh", "-c", 'exec "$@" >&-', "sh"]
    with forward:
        wait_for_polls(imds, 4)
        assert forward.stop() == 0, forward


def test_a_log_that_nothing_reads_blocks_neither_polls_nor_the_end(
    imds: ImdsLab, inbox: Inbox, tmp_path: Path
) -> None:
    sinks = {"inbox": webhook(inbox)}
    forward = Forward(tmp_path, settings(imds, sinks, log_level="debug", stop_seconds=5))
    unread, stderr = os.pipe()
    try:
        size = fcntl.fcntl(stderr, fcntl.F_SETPIPE_SZ, 4096)
        os.write(stderr, b"x" * size)
        with subprocess.Popen(forward._command, env=environment(), stderr=stderr) as process:
            for count in range(1, 4):
                schedule(imds)
                inbox.wait_for(lambda count=count: types_at(inbox).count(SCHEDULED) == count, LIMIT_SECONDS)  # type: ignore[misc]
            process.terminate()
            assert process.wait(LIMIT_SECONDS) == 0
        assert os.read(unread, 2 * size) == b"x" * size
    finally:
        os.close(unread)
        os.close(stderr)


def test_a_second_signal_ends_it_at_once(imds: ImdsLab, inbox: Inbox, tmp_path: Path) -> None:
    inbox.fault("timeout", count=None)
    patient = {**settings(imds, {"inbox": webhook(inbox, timeout_seconds=60)}), "stop_seconds": 600}
    with Forward(tmp_path, patient) as forward:
        inbox.wait_for(lambda: inbox.received, LIMIT_SECONDS)
        forward.signal(signal.SIGINT)
        forward.wait_for_log("stopping")
        forward.signal(signal.SIGTERM)
        assert forward.wait() == 1
        forward.wait_for_log("second signal")
    with Forward(tmp_path, settings(imds, {"inbox": webhook(inbox)})):
        inbox.clear_faults()
        inbox.wait_for(1, LIMIT_SECONDS)


def test_a_forwarder_with_only_a_webhook_loads_nothing_that_it_does_not_need_even_after_a_refusal(
    imds: ImdsLab, inbox: Inbox, tmp_path: Path
) -> None:
    inbox.fault(400)
    code = "import sys; from bridge.cli.main import main; main(sys.argv[1:]); print(*sys.modules)"
    forward = Forward(tmp_path, settings(imds, {"inbox": webhook(inbox)}))
    running = [sys.executable, "-c", code, "forward", "--config", str(forward.config)]
    with subprocess.Popen(
        running, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        inbox.wait_for(lambda: inbox.received, LIMIT_SECONDS)
        schedule(imds)
        inbox.wait_for(1, LIMIT_SECONDS)
        process.terminate()
        modules = process.communicate(timeout=LIMIT_SECONDS)[0].split()
    assert "bridge.sinks.webhook" in modules
    unwanted = ("azure", "jinja2", "proton", "starlette", "uvicorn", "bridge.formats.slack", "bridge.lab")
    assert not [name for name in modules if name.startswith((*unwanted, "bridge.console"))]


SECRETS = {
    "token": "tok-Zm9vYmFy",
    "old": "tok-b2xkb2xk",
    "query": "sig-cXV4cXV4+quux=",
    "header": "key-aGVsbG8h",
    "path": "T00000000-pathpathpath",
}


def test_no_secret_appears_in_any_output_even_at_debug_level(
    imds: ImdsLab, inbox: Inbox, tmp_path: Path
) -> None:
    url, token, headers = (tmp_path / name for name in ("url", "token", "headers"))
    url.write_text(f"{inbox.base_url}/services/{SECRETS['path']}?sig={SECRETS['query']}&v=1")
    token.write_text(SECRETS["old"])
    headers.write_text(f"X-Api-Key: {SECRETS['header']}\n")
    sinks = {
        "files": webhook(inbox, bearer_token_file=token, headers_file=headers, url_file=url),
        "plain": {
            "kind": "webhook",
            "url": f"http://127.0.0.1:9/?sig={SECRETS['query']}",
            "from_start": True,
            "headers": {"X-Key": SECRETS["header"]},
            "bearer_token": SECRETS["token"],
        },
    }
    del sinks["files"]["url"]
    echo = json.dumps({"you sent": list(SECRETS.values()), "to": url.read_text()})
    for status in (401, 400, 503):
        inbox.fault(status, body=echo)
    with Forward(tmp_path / "run", settings(imds, sinks, log_level="debug", stop_seconds=0.5)) as forward:
        inbox.wait_for(lambda: inbox.received, LIMIT_SECONDS)
        token.write_text(SECRETS["token"])
        schedule(imds)
        inbox.wait_for(1, LIMIT_SECONDS)
        wait_until(lambda: read_outbox(forward.state).dead)
        token.unlink()
        inbox.fault(403, body=echo, count=5)  # secrets are read again at most twice a second
        schedule(imds)
        forward.wait_for_log("a secret file cannot be used")
        forward.wait_for_status(lambda status: status["sinks"]["plain"]["state"] == "retrying")
        outputs = [
            run(*f"{command} --config {forward.config}".split())
            for command in ("status", "status --json", "outbox list --dead")
        ]
        token.write_text(SECRETS["token"])
        outputs.append(run("check", "--config", forward.config))
        assert forward.stop() == 0
    dead = str(read_outbox(forward.state).dead)
    assert "you sent" in dead
    seen = [forward.log.read_text(), dead, *(done.stdout + done.stderr for done in outputs)]
    seen += [one.read_text() for one in forward.state.glob("*.json")]
    for name, secret in SECRETS.items():
        assert not [text for text in seen if secret in text], name


def test_what_everybody_may_write_is_logged_as_an_error_and_the_state_is_for_its_owner_alone(
    imds: ImdsLab, tmp_path: Path
) -> None:
    forward = Forward(tmp_path, settings(imds, {}))
    forward.config.chmod(0o666)
    forward.state.mkdir(parents=True)
    forward.state.chmod(0o777)
    with forward:
        for path in (forward.config, forward.state):
            assert forward.wait_for_log(f"everybody may write {path}, and so")["level"] == "error"
        forward.wait_for_status(lambda status: status["document"])
        assert forward.state.stat().st_mode & 0o777 == 0o700
        modes = {path.name: path.stat().st_mode & 0o777 for path in forward.state.iterdir()}
        assert set(modes.values()) == {0o600}, modes
        assert {"lock", "outbox.db", "status.json"} <= set(modes)
        assert forward.stop() == 0
