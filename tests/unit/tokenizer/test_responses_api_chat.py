from __future__ import annotations

import json
from typing import Any

import pytest

from tokservice.protocol import context as contexts
from tokservice.protocol.guide_fields import JsonSchema, ResponseFormat
from tokservice.protocol.reading import Reader
from tokservice.protocol.requests import ChatBody, CommonSampling, FunctionCall, Message, ToolCall
from tokservice.protocol.responses_api_requests import ResponsesBody
from tokservice.protocol.tools import Function, Tool, ToolDemand, ToolName
from tokservice.tokenizer.prepare import Prepared, Preparer
from tokservice.tokenizer.responses_api_chat import MAX_REPEATED_BYTES, chat_body, repeated_fields
from tokservice.tokenizer.sampling import GenerationDefaults
from tokservice.tokenizer.traits import Traits
from tokservice.wire.errors import RequestError
from tokservice.wire.messages import Route

TOOL = {"type": "function", "name": "f", "description": "does", "parameters": {"type": "object"}, "strict": True}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "f", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "done"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
LOGPROBS: dict[str, Any] = {"include": ["message.output_text.logprobs"]}

PLAIN, THINKS = Traits(), Traits(tells_thoughts=True)


def read(**fields: Any) -> ResponsesBody:
    return Reader(ResponsesBody).read(json.dumps({"input": "hi"} | fields).encode())


def chat(traits: Traits = PLAIN, **fields: Any) -> ChatBody:
    return chat_body(read(**fields), traits)


def said(role: str, *texts: str, **fields: Any) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"role": role, "content": [{"type": kind, "text": text} for text in texts], **fields}


def test_a_text_is_a_message_of_the_user_behind_the_instructions() -> None:
    assert chat().messages == [Message("user", "hi")]
    assert chat(instructions="be brief").messages == [Message("system", "be brief"), Message("user", "hi")]


def test_items_become_messages_and_what_the_assistant_did_in_a_row_is_one() -> None:
    annotated = {"type": "output_text", "text": "so", "annotations": [], "logprobs": [{"token": "so"}]}
    answer = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [annotated]}
    items = [
        said("developer", "a", "b"),
        {"role": "user", "content": "c"},
        THOUGHT,
        answer,
        CALL,
        CALL | {"call_id": "call_2"},
        OUTPUT,
        OUTPUT | {"call_id": "call_2", "output": [{"type": "input_text", "text": "x"}]},
        THOUGHT | {"summary": [{"type": "summary_text", "text": "oh"}], "content": None},
        answer,
        answer,
        THOUGHT | {"content": None},
    ]
    calls = [ToolCall(FunctionCall("f", '{"a": 1}'), id=f"call_{number}") for number in (1, 2)]
    assert chat(input=items).messages == [
        Message("developer", "ab"),
        Message("user", "c"),
        Message("assistant", "so", tool_calls=calls, reasoning_content="hm"),
        Message("tool", "done", tool_call_id="call_1"),
        Message("tool", "x", tool_call_id="call_2"),
        Message("assistant", "so", reasoning_content="oh"),
        Message("assistant", "so"),
    ]


@pytest.mark.parametrize(
    ("status", "is_begun"), [(None, False), ("completed", False), ("incomplete", True), ("in_progress", True)]
)
def test_a_last_answer_that_is_not_complete_is_continued(status: str | None, is_begun: bool) -> None:
    last = said("assistant", "well,", type="message", status=status)
    assert chat(input=[said("user", "hi"), last]).continue_final_message is is_begun
    assert not chat(input=[last, said("user", "hi")]).continue_final_message


def test_every_way_to_sample_is_passed_on() -> None:
    values: dict[str, Any] = {"top_k": 3, "min_p": 0.1, "seed": 5, "stop": ["x"], "min_tokens": 2, "bad_words": ["y"]}
    body = chat(max_output_tokens=7, temperature=0.5, top_p=0.9, stream=True, priority=3, **values)
    assert {name: getattr(body, name) for name in values} == values
    assert (body.max_tokens, body.temperature, body.top_p, body.stream, body.priority) == (7, 0.5, 0.9, True, 3)
    assert set(CommonSampling.__struct_fields__) < set(ResponsesBody.__struct_fields__) & set(
        ChatBody.__struct_fields__
    )


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, None),
        ("auto", "auto"),
        ("required", "required"),
        ("none", "none"),
        ({"type": "function", "name": "f"}, ToolDemand(ToolName("f"))),
    ],
)
def test_tools(choice: Any, expected: Any) -> None:
    body = chat(tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    assert (body.tool_choice, body.parallel_tool_calls) == (expected, False)
    assert body.tools == [Tool(Function("f", "does", {"type": "object"}, strict=True))]


def test_formats_of_the_text() -> None:
    schema = {"type": "object", "title": "é"}
    asked = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    assert chat(text={"format": {"type": "text"}, "verbosity": "medium"}).response_format == ResponseFormat("text")
    assert chat(text={"format": {"type": "json_object"}}).response_format == ResponseFormat("json_object")
    found = chat(text={"format": asked}).response_format
    assert found is not None
    assert isinstance(found.json_schema, JsonSchema)
    assert (found.type, found.json_schema.name) == ("json_schema", "n")
    assert json.loads(bytes(found.json_schema.schema)) == schema


def test_logprobs_are_asked_for_by_include() -> None:
    assert (chat().logprobs, chat(top_logprobs=0).top_logprobs) == (False, None)
    body = chat(**LOGPROBS, top_logprobs=2)
    assert (body.logprobs, body.top_logprobs) == (True, 2)
    assert chat(**LOGPROBS, tools=[TOOL], tool_choice="none").logprobs


def test_agents_that_keep_their_own_state_ask_for_encrypted_thoughts() -> None:
    """They do so in each request, with tools and thoughts: all of them were 400s."""
    agent: dict[str, Any] = {"include": ["reasoning.encrypted_content"], "tools": [TOOL], "store": False}
    assert not chat(THINKS, **agent).logprobs
    with pytest.raises(RequestError, match="top_logprobs"):
        chat(**agent, top_logprobs=2)


def test_the_effort_is_a_variable_of_the_template() -> None:
    knows_effort = Traits(frozenset({"reasoning_effort"}))
    body = chat(knows_effort, reasoning={"effort": "low", "summary": "auto"})
    assert body.chat_template_kwargs == {"reasoning_effort": "low"}
    assert chat(reasoning={}, chat_template_kwargs={"a": 1}).chat_template_kwargs == {"a": 1}


def test_what_says_nothing_new_is_taken() -> None:
    """Clients send it with every request, or with copies of items."""
    caller = {"caller": {"type": "direct"}}
    items = [said("user", "hi"), CALL | caller, OUTPUT | caller | {"name": "f", "namespace": None}]
    items[0]["content"][0]["prompt_cache_breakpoint"] = {"mode": "explicit"}
    fields: dict[str, Any] = {
        "input": items,
        "tools": [TOOL | {"defer_loading": False, "allowed_callers": ["direct"], "output_schema": None}],
        "client_metadata": {"a": "b"},
        "access_programs": {"cyber": "standard"},
        "prompt_cache_options": {"mode": "implicit"},
        "reasoning": {"context": "auto", "mode": "standard"},
    }
    assert [message.role for message in chat(**fields).messages] == ["user", "assistant", "tool"]
    assert json.loads(repeated_fields(read(**fields), GenerationDefaults()))["tools"] == [TOOL]


def test_what_the_answer_repeats() -> None:
    fields = {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}, "metadata": {"a": "\u2028"}}
    schema: dict[str, Any] = {"type": "json_schema", "name": "n", "schema": {}, "description": None, "strict": None}
    data = repeated_fields(read(**fields, text={"format": schema}, temperature=0.5), GenerationDefaults(top_p=0.8))
    assert data.isascii()
    told = json.loads(data)
    assert {name: told[name] for name in fields} == fields
    assert (told["temperature"], told["top_p"], told["text"]) == (0.5, 0.8, {"format": schema})
    assert (told["store"], told["truncation"], told["parallel_tool_calls"]) == (False, "disabled", True)
    assert json.loads(repeated_fields(read(), GenerationDefaults()))["tool_choice"] == "auto"
    with pytest.raises(RequestError) as caught:
        repeated_fields(read(user="x" * MAX_REPEATED_BYTES), GenerationDefaults())
    assert (caught.value.status, caught.value.param) == (400, "user")


def test_a_prepared_request(preparer: Preparer) -> None:
    body = {"input": "hello", "max_output_tokens": 5, "store": False, "previous_response_id": None, "user": "me"}
    result = preparer.prepare(Route.RESPONSES, [json.dumps(body).encode()], 1.5)
    alike = {"messages": [{"role": "user", "content": "hello"}]}
    chatted = preparer.prepare(Route.CHAT_COMPLETIONS, [json.dumps(alike).encode()], 1.5)
    assert isinstance(result, Prepared)
    assert isinstance(chatted, Prepared)
    assert (result.prompts, result.sampling.max_tokens) == (chatted.prompts, 5)
    context = contexts.decode(result.context)
    assert context.response_id.startswith("resp_")
    assert json.loads(context.more_fields)["user"] == "me"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [THOUGHT | {"content": None}]}, "input"),
        ({"input": [5]}, "input"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"input": [said("user", "x", surprise=1)]}, "input"),
        ({"input": [said("user", "x"), CALL | {"arguments": "{"}]}, "input"),
        ({"input": [said("user", "x"), {"type": "web_search_call", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [THOUGHT | {"encrypted_content": "x"}]}, "input"),
        ({"input": "x " * 1000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 1}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_tool_calls": 1}, "max_tool_calls"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "file_search", "vector_store_ids": ["x"]}]}, "tools"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools"),
        ({"access_programs": {"cyber": "daybreak_red"}}, "access_programs"),
        ({"reasoning": {"mode": "pro"}}, "reasoning"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "x"}}}}, "text"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "x"}, "text"),
        ({"text": {"verbosity": "low"}}, "text"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({**LOGPROBS, "tools": [TOOL]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({**LOGPROBS, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata"),
    ],
)
def test_what_cannot_be_done_is_named(preparer: Preparer, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        preparer.prepare(Route.RESPONSES, [json.dumps({"input": "hi"} | fields).encode()], 1.5)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.code
    assert "messages" not in caught.value.message


def test_an_item_that_is_no_json_is_refused(preparer: Preparer) -> None:
    """Items are read late: until then nobody has looked into them."""
    for item in (b'{"role": "user", "content": "\xff"}', b'{"role": nope}', b"[" * 5000 + b"]" * 5000):
        with pytest.raises(RequestError) as caught:
            preparer.prepare(Route.RESPONSES, [b'{"input": [' + item + b"]}"], 1.5)
        assert (caught.value.status, caught.value.code) == (400, "invalid_json")
