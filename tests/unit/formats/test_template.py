"""An operator's own JSON: what a template can do, what it cannot, and what is checked at the start."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.config.base import Secret
from bridge.config.loader import load
from bridge.formats.template import FAILED, Template, TemplateSettings
from tests.support.diff import json_values, steady
from tests.support.samples import samples

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
SAMPLES = [event.envelope for event in samples(NOW)]
SCHEDULED = SAMPLES[0]
BREAK = "\u200b"  # the invisible blank after what would mention or link


def template(shape: Any, **settings: Any) -> Template:
    return Template(
        TemplateSettings(
            kind="webhook",
            url=Secret("https://chat.example/x"),
            format="template",
            template=shape,
            **{"types": ("*",), **settings},
        )
    )


def render(text: str, data: Any = None, **settings: Any) -> Any:
    """Render one text for the scheduled event, or for `data`, as a receiver would read it."""
    event = SCHEDULED if data is None else {**SCHEDULED, "data": data}
    return received(template({"text": text}, **settings).write(event, NOW))["text"]


def received(written: Any) -> Any:
    """Read the JSON back, strictly: no NaN, no half characters, within the limit."""
    body = json.dumps(written, allow_nan=False)
    read = json.loads(body)
    json.dumps(read, ensure_ascii=False).encode()  # a lone surrogate would be refused here
    return read


def test_a_chat_message_is_a_table_in_the_configuration_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "ntfy.json").write_text('{"topic": "ops", "message": "{{ data.EventType }}", "priority": 4}')
    (tmp_path / "config.toml").write_text(
        f"""
        [sinks.ntfy]
        kind = "webhook"
        url = "https://ntfy.example/"
        format = "template"
        template_file = '{tmp_path}/ntfy.json'

        [sinks.ops]
        kind = "webhook"
        url = "https://mattermost.example/hooks/x"
        format = "template"
        time_zone = "Europe/Berlin"

        [sinks.ops.template]
        text = '''**{{{{ notice.title }}}}**
        {{% for name in data.Resources %}}- {{{{ name }}}}
        {{% endfor %}}not before {{{{ data.NotBeforeUtc | local_time("%H:%M %Z") }}}}'''
        props = {{ card = "{{{{ data.Description | default('no description') }}}}" }}
        """
    )
    sinks: Any = load(tmp_path / "config.toml", {}).sinks
    title, *lines = Template(sinks["ops"]).write(SCHEDULED, NOW)["text"].splitlines()
    assert title.startswith("**Reboot")
    assert [line.strip() for line in lines] == ["- web-0", "- web-1", "not before 04:19 CET"]
    card = Template(sinks["ops"]).write(SCHEDULED, NOW)["props"]
    assert card == {"card": "Host server is undergoing maintenance."}
    written = Template(sinks["ntfy"]).write(SCHEDULED, NOW)
    assert written == {"topic": "ops", "message": "Reboot", "priority": 4}


@pytest.mark.parametrize("event", SAMPLES, ids=lambda event: str(event["type"]))
def test_every_type_of_event_can_be_shown(event: dict[str, Any]) -> None:
    shape = {
        "text": "{{ notice.title }}: {{ data.Resources | join(', ') }} {{ data.Description }}",
        "minutes": "{{ data.NoticeSeconds | default(0) // 60 }}",
        "all": [{"event": "{{ event }}", "data": "{{ data }}", "now": "{{ now }}"}],
        "last": [True, None, 1.5],
    }
    made = template(shape)
    made.check(NOW)
    written = received(made.write(event, NOW))
    assert written["all"][0]["data"] == event["data"]
    assert written["all"][0]["event"] == {name: value for name, value in event.items() if name != "data"}
    assert written["all"][0]["now"] == "2026-01-02T03:04:05.000Z"
    assert written["last"] == [True, None, 1.5]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{{ data.Resources }}", ["web-0", "web-1"]),
        ("{{- data.Resources -}}", ["web-0", "web-1"]),
        ("{{ data.NoticeSeconds // 60 }}", 15),
        ("{{ data.AffectsThisVm }}", True),
        ("{{ data.PreviousStatus }}", None),
        ("{{ data.Nothing.at.all }}", None),
        ("{{ {'vm': data.Vm.Name, 'n': [1, none]} }}", {"vm": "web-0", "n": [1, None]}),
        ("-{{ data.Resources }}", '-["web-0", "web-1"]'),
        ("-{{ data.PreviousStatus }}{{ data.Nothing.at.all }}", "-"),
        ("-{{ data.AffectsThisVm }}", "-true"),
        ("{% for r in data.Resources %}{{ loop.index }}{{ r }}{% endfor %}", "1web-02web-1"),
        ("{{ data.NoticeSeconds | default('?') }}{{ data.Nothing | default('?') }}", "900?"),
        ("{{ data.PreviousStatus | default('none') }} {{ data.PreviousStatus is defined }}", "none false"),
        ("-{{ data.Vm.Tags | tojson }}", '-{"env": "test"}'),
        ("{% for n, v in data.Vm.Tags | items %}{{ n }}={{ v }}{% endfor %}", "env=test"),
        ("{{ 'no instant' | local_time }}", "no instant"),
        ("{{ data.NotBeforeUtc | local_time }}", "2026-01-02 03:19 UTC"),
    ],
)
def test_one_expression_gives_the_value_itself_and_several_give_a_text(text: str, value: Any) -> None:
    assert render(text) == value


CODE = "{{ 1 + 1 }}{% for x in y %}{# c #}{{ self.__class__ }}"


@pytest.mark.parametrize("value", ["1", "[1]", "true", "null", "NaN", "None", "1e999", "{}", "'", CODE])
def test_a_text_from_outside_stays_a_text_and_is_not_evaluated_again(value: str) -> None:
    assert render("{{ data.Description }}", {"Description": value}) == value
    assert render("-{{ data.Description }}-", {"Description": value}) == f"-{value}-"


def test_only_the_template_itself_can_mention_and_link() -> None:
    data = {"Description": "@channel <!here> <users/all> [press](https://evil.example)"}
    safe = f"@{BREAK}channel <{BREAK}!here> <{BREAK}users/all> [press]{BREAK}(https://evil.example)"
    assert render("@ops {{ data.Description }}", data) == f"@ops {safe}"
    assert render("{{ data.Description }}", data) == safe
    assert render("-{{ data }}", data) == f"-{json.dumps({'Description': safe}, ensure_ascii=False)}"
    assert render("{{ data.Description | exact }}", data) == data["Description"]
    assert render("-{{ data.Description | exact }}", data) == "-" + data["Description"]
    assert render("{{ data }}", data) == data


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ data['__class__'] }}",
        "{{ data.Resources.append }}",
        "{{ data.Resources | map(attribute='__class__') | first }}",
        "{% for r in data.Resources %}{{ loop.__class__ }}{% endfor %}",
    ],
)
def test_a_template_sees_nothing_of_python(text: str) -> None:
    assert not render(text)


FAILS = "template.text: fails for io.imdsbridge."
NEAREST = "is in no event that this sink takes; did you mean"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{% import 'x' as x %}{{ x }}", FAILS),
        ("{% include 'x' %}", FAILS),
        ("{{ data.Resources + 1 }}", FAILS),
        ("{{ data.NoticeSeconds / 60 }}", FAILS),
        ("{% if data.BlindSeconds > 5 %}long{% endif %}", FAILS),
        ("{{ time }}", f"template.text: time {NEAREST} event.time?"),
        ("{{ time | default('-') }}", f"time {NEAREST} event.time?"),
        ("at {{ evnt.time }}", f"evnt {NEAREST} event?"),
        ("{{ data.EvntType }}", f"template.text: EvntType {NEAREST} EventType?"),
        ("-{{ data.Vm['Nam'] }}", f"{NEAREST} Name?"),
        ("{% for e in data.Document.Events %}{{ e.EventIdd }}{% endfor %}", f"{NEAREST} EventId?"),
        ("{{ notice.titel | upper }}", "did you mean title?"),
        ("{{ something.Vm }}", "there are event, data, notice, now"),
        ("{% for r in data.Resource %}{{ r }}{% endfor %}", f"{NEAREST} Resources?"),
        ("{{ data.Outcome }}", "Outcome is in no event that this sink takes"),  # which takes no receipts
    ],
)
def test_what_fails_for_a_type_of_event_and_a_typo_are_refused_at_the_start(text: str, expected: str) -> None:
    types = (SCHEDULED["type"],) if "Outcome" in text else ("*",)
    with pytest.raises(ValueError, match=r"^template\.text") as caught:
        template({"text": text}, types=types).check(NOW)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "text", ["{{ data | nonsense }}", "{{ data is nonsense }}", "{{ 1 + }}", "{% if data %}"]
)
def test_an_unknown_filter_and_a_slip_are_refused_with_their_place(text: str) -> None:
    with pytest.raises(ValueError, match=r"^template\.a\[0\]\.text, line 2: "):
        template({"a": [{"text": f"one\n{text}"}]})


@pytest.mark.parametrize(
    "text",
    [
        "{{ data.NewProperty | default('') }}",
        "{{ data.NewProperty is defined }}",
        "{% for event in data.Document.Events %}{{ event.EventId }}{% endfor %}{{ event.id }}",
        "{{ data.Outcome }}{{ data.BlindSeconds }}{{ data.NoticeSeconds | default(0) / 60 }}",
        "{% if data.NewProperty %}{{ data.NewProperty }}{% endif %}{{ data.Vm.Tags.any }}",
        "{{ data.NewProperty if data.NewProperty else '-' }}",
        "{% for r in data.Resources %}{{ loop.index }}{% endfor %}{% for n in range(2) %}{{ n }}{% endfor %}",
    ],
)
def test_a_property_that_only_some_events_have_is_accepted(text: str) -> None:
    template({"text": text}).check(NOW)


def test_all_faults_are_reported_together_at_the_start() -> None:
    with pytest.raises(ValueError, match=r"^template\.") as caught:
        template({"a": ["{{ data.X }}"], "b": {"c": "{{ data.Resources - 1 }}"}}).check(NOW)
    assert "template.a[0]: X " in str(caught.value)
    assert "template.b.c: fails for io.imdsbridge.scheduledevent.scheduled.v1" in str(caught.value)


def test_a_value_that_is_not_a_template_is_refused() -> None:
    for shape in ("{{ data }}", 5):
        with pytest.raises(ValueError, match="template: expected a table"):
            template(shape)


def test_a_value_that_a_template_cannot_work_with_costs_only_its_own_text() -> None:
    made = template({"text": "{{ data.DurationInSeconds | default(0) + 1 }}", "who": "{{ data.Vm.Name }}"})
    made.check(NOW)
    data = {"DurationInSeconds": "soon", "Vm": {"Name": "web-0"}}
    assert made.write({**SCHEDULED, "data": data}, NOW) == {"text": FAILED, "who": "web-0"}


PRODUCT = str(73939133 * 1000003)
MENTIONS = ["@here", "<!channel>", "{{ 73939133 * 1000003 }}", '"},{"x":"']
ODD = [*MENTIONS, "\ud800", "\x00\u2028", "NaN", "9" * 5000]
HOSTILE = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats()),
    *(st.text(st.characters(), max_size=60), st.sampled_from(ODD)),
)
KEYS = st.sampled_from(["EventType", "Name", "Tags", "items", "__class__", "@all"])
VALUES = json_values(HOSTILE, KEYS)
NAMES = ["EventType", "EventStatus", "Description", "Resources", "NotBeforeUtc", "Vm", "Events"]
SHAPE = {
    "text": "{{ notice.title }}\n{{ data.EventType | upper }} {{ data.Description }} {{ data }} {{ event.subject }}"
    "{% for r in data.Resources %}{{ loop.index }}. {{ r }}{{ r.Name }}{% endfor %}"
    "{% if data.Vm.Name == 'web-0' %}this{% endif %} {{ data.NotBeforeUtc | local_time }}",
    "filters": "{{ data.Resources | sort | unique | join(', ') | truncate(40) }} {{ data.Resources | first | title }}"
    "{{ data.NoticeSeconds | int }} {{ data.NoticeSeconds | round(1) }} {{ data.Vm | tojson | replace('@', '!') }}"
    "{{ data.Resources | map('lower') | list | length }} {{ data.Vm | items | map('last') | reverse | join }}",
    "value": [
        "{{ data.Description }}",
        {"data": "{{ data.Resources | first }}", "n": "{{ data.NoticeSeconds }}"},
    ],
}


FUZZED = template(SHAPE, time_zone="Asia/Kathmandu")


@steady
@given(
    st.dictionaries(st.sampled_from([*NAMES, "NoticeSeconds"]), VALUES) | VALUES,
    VALUES,
    st.sampled_from(SAMPLES),
)
def test_the_json_is_always_valid_and_mentions_no_one(
    data: Any, subject: Any, sample: dict[str, Any]
) -> None:
    event = {**sample, "data": data, "subject": subject}
    written = received(FUZZED.write(event, NOW))
    assert list(written) == list(SHAPE)
    for text in (written["text"], written["filters"], written["value"][0]):
        assert PRODUCT not in str(text)
        assert not isinstance(text, str) or not re.search(f"[@<](?!{BREAK})", text)
