"""The real processes: how they start, run and end, what they show of secrets, and what Prometheus scrapes."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import requests
from prometheus_client.parser import text_string_to_metric_families

from tests.support.cli import Call
from tests.support.console import STRUCTURED, TOKEN, ConsoleProcess, FleetVm, behind_proxy
from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox
from tests.support.process import LIMIT_SECONDS, Forward, environment, read_outbox, wait_until
from tests.support.programs import tool

TYPES = [f"io.imdsbridge.{name}.*" for name in ("scheduledevent", "document", "imds")]
SCHEDULED = "io.imdsbridge.scheduledevent.scheduled.v1"


def webhook(inbox: Inbox, **more: Any) -> dict[str, Any]:
    """Return a sink's settings: it takes all that documents bring about, and no heartbeats."""
    return {"kind": "webhook", "url": inbox.url, "types": TYPES, "from_start": True, **more}


def settings(imds: ImdsLab, inbox: Inbox | None = None, **more: Any) -> dict[str, Any]:
    """Return the settings of a process, which sends to the inbox if there is one."""
    given = {"endpoint": imds.url("web-0"), "poll_seconds": 0.2}
    sinks = {"inbox": webhook(inbox)} if inbox else {}
    return {"imds": given, "stop_seconds": LIMIT_SECONDS, "sinks": sinks, **more}


def hanging(imds: ImdsLab, inbox: Inbox, **more: Any) -> dict[str, Any]:
    """Return the same, and let the inbox take a request and never answer."""
    inbox.fault("timeout", count=None)
    return settings(imds, sinks={"inbox": webhook(inbox, timeout_seconds=60)}, **more)


def types_at(inbox: Inbox) -> list[str]:
    return [event["type"] for event in inbox.events()]


def schedule(imds: ImdsLab) -> str:
    return imds.schedule(event_type="Reboot", resources=["web-0"], notice_seconds=86_400)


def test_an_event_that_appears_just_before_the_signal_is_delivered(
    imds: ImdsLab, inbox: Inbox, tmp_path: Path
) -> None:
    given = settings(imds, inbox)
    given["imds"]["poll_seconds"] = 60  # the last poll comes at once all the same
    with Forward(tmp_path, given) as forward:
        inbox.wait_for(1, LIMIT_SECONDS)
        schedule(imds)
        assert forward.stop() == 0, forward
    assert SCHEDULED in types_at(inbox)


def test_a_dry_run_of_listen_publishes_a_receipt_and_approves_nothing(
    imds: ImdsLab, inbox: Inbox, tmp_path: Path
) -> None:
    sinks = {"inbox": webhook(inbox, types=["io.imdsbridge.approval.*"])}
    given = settings(imds, sinks=sinks, approvals={"auto": [{}]})
    schedule(imds)
    with Forward(tmp_path, given, role="listen", options=["--dry-run"]) as listen:
        inbox.wait_for(1, LIMIT_SECONDS)
        assert listen.stop() == 0, listen
    assert [(one["data"]["Outcome"], one["data"]["DryRun"]) for one in inbox.events()] == [("Accepted", True)]
    assert imds.approvals == []


def test_a_program_of_a_rule_finds_its_own_folder_and_the_secrets(imds: ImdsLab, tmp_path: Path) -> None:
    script = 'cat "$CREDENTIALS_DIRECTORY/word" >"$STATE_DIRECTORY/mark"'
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/word").write_text("secret")
    given = settings(imds, approvals={"auto": [{"event_type": ["Reboot"], "run": ["/bin/sh", "-c", script]}]})
    schedule(imds)
    with Forward(tmp_path, given, role="listen") as listen:
        listen.wait_for_log("approving Reboot")
    assert (tmp_path / "state/listen/programs/mark").read_text() == "secret"


def test_a_sink_that_hangs_at_the_stop_does_not_keep_the_process(
    imds: ImdsLab, inbox: Inbox, tmp_path: Path
) -> None:
    with Forward(tmp_path, hanging(imds, inbox, stop_seconds=1)) as forward:
        inbox.wait_for(lambda: inbox.received, LIMIT_SECONDS)
        assert forward.stop() == 0, forward
        assert forward.status()["running"] is False
        # One, and two more where the machine held the process up for 5 s.
        assert forward.wait_for_log("stopped with events waiting")["waiting"]["inbox"] in (1, 3)


def test_a_closed_stdout_pipe_does_not_end_the_process(imds: ImdsLab, tmp_path: Path) -> None:
    with Forward(tmp_path, settings(imds, stop_seconds=0.5), stdout=subprocess.PIPE) as forward:
        assert forward.process is not None
        assert forward.process.stdout is not None
        json.loads(forward.process.stdout.readline())
        forward.process.stdout.close()
        schedule(imds)
        forward.wait_for_log("standard output cannot be written")
        assert forward.stop() == 0, forward


def test_a_process_without_standard_output_goes_on(imds: ImdsLab, tmp_path: Path) -> None:
    forward = Forward(tmp_path, settings(imds, stop_seconds=0.5))
    forward._command[:0] = ["/bin/sh", "-c", 'exec "$@" >&-', "sh"]
    with forward:
        imds.wait_for(lambda: len(imds.requests()) >= 4, timeout=LIMIT_SECONDS)
        assert forward.stop() == 0, forward


def test_a_log_that_nothing_reads_blocks_neither_polls_nor_the_end(
    imds: ImdsLab, inbox: Inbox, tmp_path: Path
) -> None:
    forward = Forward(tmp_path, settings(imds, inbox, log_level="debug", stop_seconds=5))
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
    with Forward(tmp_path, hanging(imds, inbox, stop_seconds=600)) as forward:
        inbox.wait_for(lambda: inbox.received, LIMIT_SECONDS)
        forward.signal(signal.SIGINT)
        forward.wait_for_log("stopping")
        forward.signal(signal.SIGTERM)
        assert forward.wait() == 1
        forward.wait_for_log("second signal")
    with Forward(tmp_path, settings(imds, inbox)):
        inbox.clear_faults()
        inbox.wait_for(1, LIMIT_SECONDS)


def test_a_forwarder_with_only_a_webhook_loads_nothing_that_it_does_not_need_even_after_a_refusal(
    imds: ImdsLab, inbox: Inbox, tmp_path: Path
) -> None:
    inbox.fault(400)
    code = "import sys; from bridge.cli.main import main; main(sys.argv[1:]); print(*sys.modules)"
    forward = Forward(tmp_path, settings(imds, inbox))
    forward._command[:3] = [sys.executable, "-c", code]  # of what starts bridge
    with forward:
        inbox.wait_for(lambda: inbox.received, LIMIT_SECONDS)
        schedule(imds)
        inbox.wait_for(1, LIMIT_SECONDS)
        assert forward.stop() == 0, forward
    modules = forward.output.read_text().split()
    assert "bridge.sinks.webhook" in modules
    unwanted = ("azure", "jinja2", "proton", "starlette", "uvicorn", "bridge.formats.slack", "bridge.lab")
    assert not [name for name in modules if name.startswith((*unwanted, "bridge.console"))]


TOKENS = {"token": "tok-Zm9vYmFy", "old": "tok-b2xkb2xk"}
QUERY, HEADER, PLACE = "sig-cXV4cXV4+quux=", "key-aGVsbG8h", "T00000000-pathpathpath"
SECRETS = {**TOKENS, "query": QUERY, "header": HEADER, "path": PLACE}


def test_no_secret_appears_in_any_output_even_at_debug_level(
    imds: ImdsLab, inbox: Inbox, tmp_path: Path, call: Call
) -> None:
    url, token, headers = (tmp_path / name for name in ("url", "token", "headers"))
    url.write_text(f"{inbox.base_url}/services/{PLACE}?sig={QUERY}&v=1")
    token.write_text(TOKENS["old"])
    headers.write_text(f"X-Api-Key: {HEADER}\n")
    files = webhook(inbox, bearer_token_file=token, headers_file=headers, url_file=url)
    del files["url"]
    plain = webhook(inbox, headers={"X-Key": HEADER}, bearer_token=TOKENS["token"])
    plain["url"] = f"http://127.0.0.1:9/?sig={QUERY}"
    echo = json.dumps({"you sent": list(SECRETS.values()), "to": url.read_text()})
    for status in (401, 400, 503):
        inbox.fault(status, body=echo)
    given = settings(imds, sinks={"files": files, "plain": plain}, log_level="debug", stop_seconds=0.5)
    with Forward(tmp_path / "run", given) as forward:
        inbox.wait_for(lambda: inbox.received, LIMIT_SECONDS)
        token.write_text(TOKENS["token"])
        schedule(imds)
        inbox.wait_for(1, LIMIT_SECONDS)
        wait_until(lambda: read_outbox(forward.state).dead)
        token.unlink()
        inbox.fault(403, body=echo, count=5)  # secrets are read again at most twice a second
        schedule(imds)
        forward.wait_for_log("a secret file cannot be used")
        forward.wait_for_status(lambda status: status["sinks"]["plain"]["state"] == "retrying")
        commands = ("status", "status --json", "outbox list --dead")
        outputs = [call(*command.split(), "--config", forward.config) for command in commands]
        token.write_text(TOKENS["token"])
        outputs.append(call("check", "--config", forward.config))
        assert forward.stop() == 0
    dead = str(read_outbox(forward.state).dead)
    assert "you sent" in dead
    seen = [forward.log.read_text(), dead, *(done.out + done.err for done in outputs)]
    assert all(done.out for done in outputs)
    seen += [one.read_text() for one in forward.state.glob("*.json")]
    for name, secret in SECRETS.items():
        assert not [text for text in seen if secret in text], name


def test_what_everybody_may_write_is_logged_as_an_error_and_the_state_is_for_its_owner_alone(
    imds: ImdsLab, tmp_path: Path
) -> None:
    forward = Forward(tmp_path, settings(imds))
    forward.config.chmod(0o666)
    forward.state.mkdir(parents=True)
    forward.state.chmod(0o777)
    with forward:
        for path in (forward.config, forward.state):
            assert forward.wait_for_log(f"everybody may write {path}, and so")["level"] == "error"
        forward.wait_for_status(lambda status: status["document"])
        assert forward.state.stat().st_mode & 0o777 == 0o700
        modes = {}
        for path in forward.state.iterdir():
            with suppress(FileNotFoundError):  # a new status has its name by now
                modes[path.name] = path.stat().st_mode & 0o777
        assert set(modes.values()) == {0o600}, modes
        assert {"lock", "outbox.db", "status.json"} <= set(modes)
        assert forward.stop() == 0


# --- metrics ---


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Return every sample by its name and the values of its labels."""
    return {
        (one.name.removeprefix("imds_bridge_"), *(one.labels[name] for name in sorted(one.labels))): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def served(forward: Forward) -> str:
    """Return where the process serves metrics: it names the port in its log."""
    port = wait_until(lambda: next((line["port"] for line in forward.lines() if "port" in line), None))
    return f"http://127.0.0.1:{port}"


def scrape(url: str, **headers: str) -> str:
    return requests.get(f"{url}/metrics", headers=headers, timeout=LIMIT_SECONDS).text


def test_a_change_is_counted_from_imds_to_the_receiver(imds: ImdsLab, inbox: Inbox, tmp_path: Path) -> None:
    sinks = {"ops": {"kind": "webhook", "url": inbox.url}}
    with Forward(tmp_path, settings(imds, sinks=sinks, metrics={"listen": "127.0.0.1:0"})) as forward:
        url = served(forward)
        imds.schedule(event_type="Reboot", resources=["web-0"], notice_seconds=890)
        wait_until(lambda: samples(scrape(url))["deliveries_total", "delivered", "ops"] >= 3)
        text = scrape(url)
    found = samples(text)
    counted = {
        ("changes_total", "scheduled"): 1,
        ("scheduled_events", "Scheduled", "Reboot"): 1,
        ("notice_seconds_bucket", "900.0", "Reboot"): 1,
        ("notice_seconds_bucket", "600.0", "Reboot"): 0,
        ("storage_errors_total",): 0,
    }
    assert {one: found[one] for one in counted} == counted
    assert found["polls_total", "answered"] >= 1
    assert found["delivery_seconds_count", "ops"] >= 3
    assert found["outbox_bytes",] > 0
    assert ("loop_progress_age_seconds", "poll") in found
    assert "web-0" not in text
    command = [tool("promtool"), "check", "metrics"]
    checked = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=30)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_console_serves_the_same_port_as_the_others(tmp_path: Path) -> None:
    authorization = {"Authorization": f"Bearer {TOKEN}"}
    with ConsoleProcess(tmp_path, metrics="127.0.0.1:0", **behind_proxy()) as console:
        url, body = served(console), FleetVm("web-0").heartbeat()
        requests.post(f"{console.url}/ingest", body, headers={**STRUCTURED, **authorization}, timeout=30)
        found = samples(scrape(url))
        assert found["console_received_total",] == found["storage_available",] == 1
        assert ("loop_progress_age_seconds", "write") in found
        assert samples(scrape(console.url, **authorization)).keys() == found.keys()
        for path in ("livez", "readyz"):
            answer = requests.get(f"{url}/{path}", timeout=30).json()
            assert answer == {"ok": True, "role": "console", "reasons": []}
