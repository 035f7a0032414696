from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tokservice.tokenizer import chat_template
from tokservice.tokenizer.chat_template import ChatTemplate
from tokservice.wire.errors import RequestError, StartupError

USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **variables: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    return template.render(messages or USER, now=0.0, add_generation_prompt=True, variables=variables)


def test_the_names_that_templates_rely_on() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}{{ add_generation_prompt }}") == "<s>hiTrue"
    assert render("{{ strftime_now('%Y') }}") in ("1969", "1970")
    assert render("{{ {'a<b': 'é'} | tojson }}") == '{"a<b": "é"}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "ahib"
    assert render("{% if tools is none %}no tools{% endif %}") == "no tools"


def test_blocks_leave_no_blank_lines() -> None:
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"


def test_variables_of_the_request() -> None:
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    for name in ("messages", "bos_token", "strftime_now", "tools", "raise_exception", "range"):
        with pytest.raises(RequestError) as caught:
            ChatTemplate("x", {"bos_token": "<s>"}).render(
                USER, now=0.0, add_generation_prompt=True, variables={name: 1}
            )
        assert caught.value.param == "chat_template_kwargs"
    assert render("x", self=1, not_an_identifier=2) == "x"


def test_which_variables_a_template_reads() -> None:
    """Those of a request, not names that only look alike, or that it makes itself."""
    source = "{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
    assert "enable_thinking" in ChatTemplate(source, {}).variables
    source = "{% set ns = namespace(thinking=1) %}{{ ns.thinking }}{{ messages[0].thinking }} reasoning_effort"
    assert ChatTemplate(source, {}).variables == {"messages"}


@pytest.mark.parametrize(
    ("source", "takes"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", True),
        ("{% for m in messages %}{% if m.role == 'user' or loop.first %}{{ m.content }}{% endif %}{% endfor %}", False),
        (
            "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('Late') }}"
            "{% endif %}{{ m.content }}{% endfor %}",
            False,
        ),
        (
            "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
            "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
            False,
        ),
    ],
)
def test_whether_a_system_message_can_be_late(source: str, takes: bool) -> None:
    assert ChatTemplate(source, {}).shows.late_system is takes


def test_the_templates_own_complaint_reaches_the_client() -> None:
    """It surfaced as an unhandled exception: vllm#16774."""
    with pytest.raises(RequestError, match=r"^Roles must alternate$") as caught:
        render("{{ raise_exception('Roles must alternate') }}")
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ nowhere.nothing }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages[0]['content'].format.__globals__.x }}",
        "{{ '{0.__class__.__base__}'.format(1) }}",
    ],
)
def test_a_failing_or_forbidden_template_is_a_client_error(source: str) -> None:
    """Templates of a model repository ran without a sandbox: litellm#2949."""
    with pytest.raises(RequestError) as caught:
        render(source)
    assert caught.value.status == 400


def test_a_broken_template_is_a_startup_error() -> None:
    with pytest.raises(StartupError, match="chat template is broken"):
        ChatTemplate("{% if %}", {})


def test_the_form_of_tool_arguments_is_decided_by_the_template() -> None:
    """Some templates iterate a mapping, others concatenate a string: Qwen3#1894."""
    loop = "{% for m in messages %}{% for c in m.tool_calls or [] %}%s{% endfor %}{% endfor %}"
    concatenates = loop.replace("%s", "{{ 'args: ' + c.function.arguments }}")
    iterates = loop.replace("%s", "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}")
    assert ChatTemplate(concatenates, {}).shows.arguments_as_text
    assert not ChatTemplate(iterates, {}).shows.arguments_as_text
    assert not ChatTemplate("{{ raise_exception('no') }}", {}).shows.arguments_as_text


def test_words_of_the_template_are_no_sign_that_it_shows_calls_and_results() -> None:
    """What is taken for shown, and is not, would be lost without a sign."""
    turns = "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}"
    shows = ChatTemplate(f"You are a tool, one of many tools, or a developer. {turns}", {}).shows
    assert [shows.tools, shows.calls, shows.results, shows.system] == [False, False, False, True]
    assert not ChatTemplate("{# developer #}{{ messages[-1].content }}", {}).shows.developer


@pytest.mark.parametrize(
    "source",
    [
        "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}",
        "{% if tools %}{{ tools | tojson }}{% endif %}",
        "{{ tools }}",
        "{% for tool in tools %}{% for k, v in tool.function.parameters.properties | items %}{{ k }}{{ v.type }}"
        "{% endfor %}{{ tool.function.parameters.required | join }}{{ tool.function.name }}{% endfor %}",
    ],
)
def test_a_template_that_shows_tools(source: str) -> None:
    assert ChatTemplate(source, {}).shows.tools


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    assert chat_template.load(tmp_path, "") is None
    config = tmp_path / "tokenizer_config.json"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "apart"}))
    assert sources(tmp_path) == ("apart", "apart")
    named = [{"name": name, "template": name} for name in ("rag", "tool_use", "default")]
    config.write_text(json.dumps({"chat_template": named}))
    assert sources(tmp_path) == ("default", "tool_use")
    config.write_text(json.dumps({"chat_template": named[:2]}))
    assert chat_template.load(tmp_path, "") is None
    special = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": None}
    config.write_text(json.dumps({"chat_template": "{{ bos_token }}{{ eos_token }}", **special}))
    assert sources(tmp_path) == ("<s>", "<s>")
    (tmp_path / "chat_template.jinja").write_text("file")
    assert sources(tmp_path) == ("file", "file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("beside")
    assert sources(tmp_path) == ("file", "beside")
    (tmp_path / "mine.jinja").write_text("mine")
    assert sources(tmp_path, str(tmp_path / "mine.jinja")) == ("mine", "mine")
    with pytest.raises(StartupError, match=r"cannot read .*missing\.jinja"):
        chat_template.load(tmp_path, str(tmp_path / "missing.jinja"))


@pytest.mark.parametrize("broken", [[{"name": "default"}], ["x"], [3], {"default": "x"}, 3])
def test_a_list_of_templates_that_makes_no_sense_is_a_startup_error(tmp_path: Path, broken: Any) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": broken}))
    with pytest.raises(StartupError, match="chat template"):
        chat_template.load(tmp_path, "")


def sources(folder: Path, override: str = "") -> tuple[str, ...]:
    """What is written for a request, and for one with tools."""
    templates = chat_template.load(folder, override)
    assert templates is not None
    return tuple(template.render(USER, now=0.0, add_generation_prompt=True) for template in templates)
