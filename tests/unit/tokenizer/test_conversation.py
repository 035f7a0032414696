from __future__ import annotations

import json
import re
import time
from typing import Any

import msgspec
import pytest

from tests.helpers.tiny_tokenizers import CHAT_TEMPLATE
from tokservice.protocol.requests import Message
from tokservice.tokenizer import conversation
from tokservice.tokenizer.chat_template import ChatTemplate
from tokservice.tokenizer.fitted import fitted
from tokservice.wire.errors import RequestError

CHATML = ChatTemplate(CHAT_TEMPLATE, {})
STRICT = ChatTemplate(  # refuses other roles
    "{% for m in messages %}{% if m.role != ('user' if loop.index0 is even else 'assistant') %}"
    "{{ raise_exception('roles must alternate, without ' + m.role) }}{% endif %}<{{ m.role }}>{{ m.content }}"
    "{% endfor %}",
    {},
)
SPOKEN = ChatTemplate(  # leaves them out
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}<{{ m.role }}>{{ m.content }}{% endif %}"
    "{% endfor %}",
    {},
)
TOOLS = "{% for m in messages %}{% for c in m.tool_calls or [] %}%s{% endfor %}{% endfor %}"


def render(messages: list[dict[str, Any]], template: ChatTemplate = CHATML, **options: Any) -> str:
    flags = {"add_generation_prompt": None, "continue_final_message": None, "variables": None} | options
    parsed = msgspec.json.decode(json.dumps(messages).encode(), type=list[Message])
    return conversation.render(template, parsed, now=0.0, mark="<mark>", **flags)


def refused(messages: list[dict[str, Any]], template: ChatTemplate = CHATML, **options: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        render(messages, template, **options)
    assert caught.value.status == 400
    return caught.value


def test_the_generation_prompt_is_added_unless_refused() -> None:
    turn = "<|im_start|>user\nhi<|im_end|>\n"
    assert render([{"role": "user", "content": "hi"}]) == turn + "<|im_start|>assistant\n"
    assert render([{"role": "user", "content": "hi"}], add_generation_prompt=False) == turn


def test_text_parts_are_joined() -> None:
    """A list of parts reached a template that concatenates strings: InternVL#726."""
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert render([{"role": "user", "content": parts}]) == render([{"role": "user", "content": "one two"}])


PARTS = ChatTemplate(
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endfor %}",
    {},
)


@pytest.mark.parametrize("content", ["one two", [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]])
def test_a_template_that_goes_through_parts_gets_them(content: Any) -> None:
    """Where texts and parts were mixed up the user's words were left out without a sign: LiteRT-LM#3688, vllm#9358."""
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": content}, {"role": "assistant"}]
    assert render(messages, PARTS) == "<system>be<user>one two<assistant>"
    assert render(messages, PARTS, continue_final_message=True) == "<system>be<user>one two<assistant>"


@pytest.mark.parametrize("content", [None, "", []])
def test_null_content_is_an_empty_text(content: Any) -> None:
    assert render([{"role": "user", "content": content}]) == render([{"role": "user"}])


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "image_url"),
        ({"type": "input_audio"}, "input_audio"),
        ({"type": 3, "text": "x"}, "None"),
        ({"text": "x"}, "None"),
        ({"type": "text"}, "'text'"),
        ({"type": "text", "text": 5}, "'text'"),
        ({"type": "text", "text": "x", "weight": 2}, "weight"),
    ],
)
def test_other_parts_are_named(part: dict[str, Any], named: str) -> None:
    error = refused([{"role": "user", "content": [{"type": "text", "text": "look"}, part]}])
    assert named in error.message
    assert error.param == "messages"


def test_developer_is_system_unless_the_template_knows_it() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert "<|im_start|>system\nx" in render(messages)
    assert "<|im_start|>developer\nx" in render(messages, ChatTemplate(CHAT_TEMPLATE + "{# developer #}", {}))


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
        [{"role": "assistant", "content": "a"}],
    ],
)
def test_a_strict_template_refuses_in_its_own_words(messages: list[dict[str, Any]]) -> None:
    """vllm#16774"""
    assert refused(messages, STRICT).message.startswith("roles must alternate")


@pytest.mark.parametrize("template", [STRICT, SPOKEN])
def test_system_messages_are_said_by_the_user_where_the_template_takes_none(template: ChatTemplate) -> None:
    """Such templates refuse them (sglang#892), or leave them out without a sign."""
    turns = [("developer", "be brief"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("system", "d")]
    messages = [{"role": role, "content": text} for role, text in turns]
    assert render(messages, template) == "<user>be brief\n\na<assistant>b<user>c\n\nd"
    assert render(messages[:3], template, continue_final_message=True) == "<user>be brief\n\na<assistant>b"
    told = render(messages, template, tools=[{"type": "function", "function": {"name": "f"}}])
    assert told.startswith("<user>be brief\n\nYou can call the functions")
    assert '"name": "f"' in told
    assert told.endswith("</tool_call>\n\na<assistant>b<user>c\n\nd")


def test_later_system_messages_join_others_where_the_template_takes_one_alone() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('only at the beginning') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}",
        {},
    )
    turns = [("system", "a"), ("user", "b"), ("system", "c"), ("assistant", "d"), ("developer", "e")]
    messages = [{"role": role, "content": text} for role, text in turns]
    assert render(messages, template) == "<system>a<user>b\n\nc<assistant>d<user>e"
    assert render(messages).count("<|im_start|>system") == 3  # this one takes them anywhere


def test_no_messages_are_refused() -> None:
    assert refused([]).param == "messages"


def calls(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]


def test_a_call_of_a_custom_tool_is_shown_as_one_of_a_function() -> None:
    shows = ChatTemplate(TOOLS.replace("%s", "{{ c.function | tojson }}"), {})
    call = {"id": "1", "type": "custom", "custom": {"name": "f", "input": '+ "a"'}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    assert json.loads(render(messages, shows)) == {"name": "f", "arguments": {"input": '+ "a"'}}


@pytest.mark.parametrize(
    "call",
    [
        {"type": "custom", "function": {"name": "f"}},
        {"type": "function", "custom": {"name": "f", "input": ""}},
        {"custom": {"name": "f", "input": ""}},
        {"type": "custom", "function": {"name": "f"}, "custom": {"name": "f", "input": ""}},
        {},
    ],
)
def test_a_call_has_the_part_that_its_type_names(call: Any) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    assert refused(messages).param == "messages"


@pytest.mark.parametrize("arguments", ['{"k": "v"}', {"k": "v"}])
def test_tool_arguments_take_the_form_that_the_template_needs(arguments: Any) -> None:
    """Qwen3#1894"""
    iterates = ChatTemplate(
        TOOLS.replace("%s", "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"), {}
    )
    concatenates = ChatTemplate(TOOLS.replace("%s", "{{ 'f' + c.function.arguments }}"), {})
    assert render(calls(arguments), iterates) == "k=v"
    assert render(calls(arguments), concatenates) == 'f{"k": "v"}'


def test_arguments_that_are_written_as_they_are_are_json() -> None:
    """In the form of Python, of which single quotes are the sign, they are no JSON (as in a template of Phi-4-mini)."""
    prints = ChatTemplate(TOOLS.replace("%s", "{{ c.function.name }}({{ c.function.arguments }})"), {})
    assert render(calls({"k": "v"}), prints) == 'f({"k": "v"})'


@pytest.mark.parametrize("content", [None, "", []])
def test_calls_that_are_shown_beside_no_content_alone(content: Any) -> None:
    """The templates of DeepSeek V3 and R1 left them out where the content was an empty text."""
    shows = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}"
        "{{ c.function.name + c.function.arguments }}{% endfor %}{% elif m.role == 'assistant' %}{{ m.content }}"
        "{% endif %}{% endfor %}",
        {},
    )
    messages = calls({"k": "v"})
    messages[1]["content"] = content
    assert render(messages, shows) == 'f{"k": "v"}'


@pytest.mark.parametrize("arguments", ["", " ", "null", "{}", None, {}])
def test_no_tool_arguments_are_an_empty_object(arguments: Any) -> None:
    """A call without arguments, sent back, was refused, or reached the template as none: vllm#43851, vllm#19419."""
    for written in ("{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}"):
        assert render(calls(arguments), ChatTemplate(TOOLS.replace("%s", written), {})) == "{}"


@pytest.mark.parametrize("arguments", ["{", "[1]", "3", '"x"', "[" * 20_000, '{"k":' * 1000 + "1" + "}" * 1000])
def test_tool_arguments_that_are_no_object_are_shown_as_a_text(arguments: str) -> None:
    """Refused, they ended each conversation that held such a call: vllm#43995, software-agent-sdk#2888. Nesting inside
    the string is bounded like that of the body: Rapid-MLX#798.
    """
    mapping = ChatTemplate(TOOLS.replace("%s", "{{ c.function.arguments | tojson }}"), {})
    assert json.loads(render(calls(arguments), mapping)) == {"input": arguments}
    assert (
        render(calls(arguments), ChatTemplate(TOOLS.replace("%s", "{{ '' + c.function.arguments }}"), {})) == arguments
    )


def test_ids_of_calls_are_short_where_the_template_takes_no_others() -> None:
    """Mistral's refuse the ids of other servers, and calls without any: vllm#9019, mlx-lm#1375."""
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if not c.id is defined or c.id|length != 9 %}"
        "{{ raise_exception('ids') }}{% endif %}<{{ c.id }}>{{ c.function | tojson }}{% endfor %}"
        "{% if m.role == 'tool' %}{% if not m.tool_call_id is defined or m.tool_call_id|length != 9 %}"
        "{{ raise_exception('ids') }}{% endif %}<{{ m.tool_call_id }}>{{ m.content }}{% endif %}{% endfor %}"
    )
    strict, other = ChatTemplate(source, {}), ChatTemplate(source.replace("!= 9", "> 99"), {})
    for call_id in ("call_0123456789abcdef", "a-b-c-d-e", "", None, "abcdef123"):
        messages = [*calls({}), {"role": "tool", "content": "x", "tool_call_id": call_id}]
        messages[1]["tool_calls"][0]["id"] = call_id
        called, answered = re.findall("<(.*?)>", render(messages, strict))
        assert called == answered
        assert called.isalnum()
        assert (called == call_id) == (call_id == "abcdef123")
        if call_id is not None:
            assert re.findall("<(.*?)>", render(messages, other)) == [call_id, call_id]


ROLES = ChatTemplate(  # knows these roles alone, and nothing of tools
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}<{{ m.role }}>{{ m.content }}{% endif %}"
    "{% endfor %}",
    {},
)


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f"}}]])
def test_calls_and_results_are_seen_where_the_template_knows_no_tools(tools: Any) -> None:
    """They were left out without a sign, at least in a last turn without tools, or with tool_choice "none"."""
    results = [{"role": "tool", "tool_call_id": "1", "content": text} for text in ("one", "two")]
    messages = [*calls({"k": "v"}), *results, {"role": "assistant", "content": "so"}]
    call = '<tool_call>\n{"name": "f", "arguments": {"k": "v"}}\n</tool_call>'
    said = "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
    assert render(messages, ROLES, tools=tools).endswith(f"<user>x<assistant>{call}<user>{said}<assistant>so")
    assert call in render(messages, tools=tools)  # this one shows any role
    assert "<|im_start|>tool\none" in render(messages, tools=tools)


def test_what_the_user_says_behind_results_joins_them() -> None:
    """Clients of Anthropic's API send both in one message; Llama 2's template and others take no two in a row."""
    results = [{"role": "tool", "tool_call_id": "1", "content": "one"}]
    turns = [*calls({}), *results, {"role": "user", "content": "hm"}, {"role": "user", "content": "x"}]
    joined = "<user><tool_response>\none\n</tool_response>\nhm<user>x"
    assert render(turns, ROLES).endswith(joined)


def test_what_the_user_says_behind_results_joins_them_where_the_template_refuses_it() -> None:
    """Mistral's, which count the messages of the user and the answers alone: hermes-agent#84944, mistral-vibe#1006."""
    source = (
        "{% set ns = namespace(index=0) %}{% for m in messages %}{% if m.role != 'tool' and not m.tool_calls %}"
        "{% if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% set ns.index = ns.index + 1 %}{% endif %}<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
    )
    turns = [*calls({}), {"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}]
    turns += [{"role": "user", "content": "hm"}, {"role": "user", "content": "go on"}]
    turns += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "so"}]
    assert render(turns, ChatTemplate(source, {})).endswith("<tool>one<tool>two\n\nhm\n\ngo on<assistant>yes<user>so")
    assert "two<|im_end|>\n<|im_start|>user\nhm" in render(turns)


def test_results_name_their_tools_where_the_template_needs_it() -> None:
    """Clients leave it to the ids of calls, and FunctionGemma's template refused each result: maclocal-api#67."""
    source = (
        "{% for m in messages %}<{{ m.role }}{{ m.name }}>{% if m.role == 'tool' and not m.name %}"
        "{{ raise_exception('name must be provided') }}{% endif %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
    )
    results = [
        {"role": "tool", "content": "one", "tool_call_id": "1"},
        {"role": "tool", "content": "two", "tool_call_id": "1", "name": "own"},
        {"role": "tool", "content": "three"},
    ]
    turns = [*calls({}), *results]
    assert render(turns, ChatTemplate(source, {})).endswith("<toolf>one<toolown>two<tooltool>three")
    needless = source.replace("m.role == 'tool' and not m.name", "false")
    assert render(turns, ChatTemplate(needless, {})).endswith("<tool>one<toolown>two<tool>three")


def test_a_system_message_that_the_template_shows_with_the_last_message_alone_stays() -> None:
    """Mistral's show it with a last message of the user, and left it out as soon as a tool had answered, or the
    client had begun the answer.
    """
    template = ChatTemplate(
        "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{% if loop.last and m.role == 'user' and "
        "messages[0].role == 'system' %}{{ messages[0].content }}+{% endif %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endif %}{% endfor %}",
        {},
    )
    turns = [{"role": "system", "content": "be"}, *calls({}), {"role": "tool", "content": "one"}]
    assert render(turns, template).startswith("<user>be\n\nx<assistant>{")
    assert render([*turns, {"role": "user", "content": "so"}], template).endswith("<tool>one<user>be+so")
    assert render(turns[:2], template) == "<user>be+x"
    begun = [*turns[:2], {"role": "assistant", "content": "so "}]
    assert render(begun, template, continue_final_message=True) == "<user>be\n\nx<assistant>so "


def test_many_results_in_a_row_take_no_longer_each() -> None:
    """Each was copied for each that followed: a body of 2 MB kept a tokenizer worker for 6 s."""
    results = [{"role": "tool", "content": "y" * 200}] * 30_000
    start = time.process_time()
    said, _ = fitted([{"role": "user", "content": "x"}, *results], None, ROLES.shows)
    assert time.process_time() - start < 5
    assert [turn["role"] for turn in said] == ["user", "user"]


def test_a_template_that_shows_calls_gets_them() -> None:
    """Unless the model is told of tools in words, and so of another form."""
    shows = ChatTemplate(TOOLS.replace("%s", "{{ c.function.name }}") + "{{ messages[-1].content }}", {})
    assert render(calls({}), shows) == "f"
    told = render(calls({}), shows, tools=[{"type": "function", "function": {"name": "f"}}])
    assert told.startswith("<tool_call>")


def test_copies_of_our_own_answers_are_accepted() -> None:
    copy: dict[str, Any] = {
        "role": "assistant",
        "content": "a",
        "refusal": None,
        "annotations": [],
        "tool_calls": None,
        "audio": None,
    }
    assert "a<|im_end|>" in render([{"role": "user", "content": "x"}, copy, {"role": "user", "content": "y"}])
    assert "refusal" in refused([{"role": "assistant", "content": "a", "refusal": "no"}]).message


@pytest.mark.parametrize("final", ["and then", "", "same", "trailing blanks  \n", "<|im_end|>\n"])
def test_the_final_message_is_continued_where_it_ends(final: str) -> None:
    """The text was cut at an earlier copy, blanks were lost, empty text was ignored: dynamo#13841."""
    trims = ChatTemplate(CHAT_TEMPLATE.replace("message.content", "message.content | trim"), {})
    messages = [{"role": "user", "content": "same"}, {"role": "assistant", "content": final}]
    for template in (CHATML, trims):
        text = render(messages, template, continue_final_message=True)
        assert text == "<|im_start|>user\nsame<|im_end|>\n<|im_start|>assistant\n" + final


def test_contradictory_continuations_are_refused() -> None:
    assistant = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    both = refused(assistant, continue_final_message=True, add_generation_prompt=True)
    user = refused(assistant[:1], continue_final_message=True)
    hidden = refused(assistant, ChatTemplate("{{ messages[0].content }}", {}), continue_final_message=True)
    calling = refused(calls({}), continue_final_message=True)  # what followed the text, the calls, was lost
    assert {both.param, user.param, hidden.param, calling.param} == {"continue_final_message"}
