"""Tools whose input is a text, and choices among tools, by the official ``openai`` client against the default model."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

pytestmark = pytest.mark.timeout(300)

PATCH = '*** Begin\n+ a = "é"\n*** End'
LARK = {"syntax": "lark", "definition": 'start: "*** Begin\\n" /[a-z ]{1,8}/ "\\n*** End"'}
REGEX = {"syntax": "regex", "definition": "(left|right)!"}
FOLLOWS_LARK = r"\*\*\* Begin\n[a-z ]{1,8}\n\*\*\* End"
ASKED = "Apply a patch."


def flat(format: Any = None, name: str = "apply_patch") -> dict[str, Any]:
    """A custom tool of the Responses API."""
    return {"type": "custom", "name": name, "description": "Edits files", "format": format}


def nested(format: Any = None, name: str = "apply_patch") -> dict[str, Any]:
    """The same of a chat."""
    return {"type": "custom", "custom": {"name": name, "description": "Edits files", "format": format}}


def function(name: str) -> dict[str, Any]:
    return {"name": name, "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}


def written(text: str) -> dict[str, Any]:
    """Has the model write a call as it would in a free answer."""
    call = json.dumps({"name": "apply_patch", "arguments": {"input": text}})
    return {"guided_choice": [f"<tool_call>\n{call}\n</tool_call>"]}


@pytest.mark.parametrize(
    ("tool", "more", "pattern"),
    [
        (flat(), {"extra_body": written(PATCH)}, re.escape(PATCH)),
        (flat({"type": "grammar", **LARK}), {"tool_choice": {"type": "custom", "name": "apply_patch"}}, FOLLOWS_LARK),
        (
            flat({"type": "grammar", **REGEX}),
            {"tool_choice": "required", "parallel_tool_calls": False},
            "(left|right)!",
        ),
    ],
)
def test_responses(api: openai.OpenAI, model: str, tool: Any, more: Any, pattern: str) -> None:
    """Codex's apply_patch is such a tool: all of its requests were 400s."""
    asked: Any = {"model": model, "input": ASKED, "tools": [tool], "temperature": 0, **more}
    response = api.responses.create(**asked)
    plain = Response.model_validate(response.to_dict(), strict=False)
    (call,) = plain.output
    assert call.type == "custom_tool_call"
    assert call.name == "apply_patch"
    assert (call.id or "").startswith("ctc_")
    assert re.fullmatch(pattern, call.input)
    assert response.to_dict()["tools"] == [tool]

    events: list[Any] = list(api.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[2] == "response.output_item.added"
    assert events[2].item.input == ""
    assert kinds[-3:-1] == ["response.custom_tool_call_input.done", "response.output_item.done"]
    assert (
        "".join(event.delta for event in events if event.type == "response.custom_tool_call_input.delta") == call.input
    )
    assert events[-3].input == events[-2].item.input == events[-1].response.output[0].input == call.input
    with api.responses.stream(**asked) as stream:
        (final,) = stream.get_final_response().output
    assert final.type == "custom_tool_call"
    assert final.input == call.input

    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done."}
    items: Any = [{"role": "user", "content": ASKED}, final, output]
    after = api.responses.create(model=model, input=items, tools=[tool], max_output_tokens=3)
    assert after.usage is not None
    assert after.usage.input_tokens > (plain.usage.input_tokens if plain.usage else 0)


@pytest.mark.parametrize(
    ("tool", "more", "pattern"),
    [
        (nested(), {"extra_body": written(PATCH)}, re.escape(PATCH)),
        (
            nested({"type": "grammar", "grammar": LARK}),
            {"tool_choice": {"type": "custom", "custom": {"name": "apply_patch"}}},
            FOLLOWS_LARK,
        ),
    ],
)
def test_chats(api: openai.OpenAI, model: str, tool: Any, more: Any, pattern: str) -> None:
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    asked: Any = {"model": model, "messages": messages, "tools": [tool], "temperature": 0, **more}
    answer = api.chat.completions.create(**asked)
    choice = ChatCompletion.model_validate(answer.to_dict(), strict=False).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert call.type == "custom"
    assert call.custom.name == "apply_patch"
    assert re.fullmatch(pattern, call.custom.input)

    deltas = [
        delta.to_dict()
        for chunk in api.chat.completions.create(**asked, stream=True)
        for delta in chunk.choices[0].delta.tool_calls or []
    ]
    assert (deltas[0]["type"], deltas[0]["custom"]["name"]) == ("custom", "apply_patch")
    assert {delta["index"] for delta in deltas} == {0}
    assert "".join(delta["custom"]["input"] for delta in deltas) == call.custom.input

    turns: Any = [*messages, choice.message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "Done."}]
    after = api.chat.completions.create(model=model, messages=turns, tools=[tool], max_tokens=3)
    assert after.usage is not None
    assert after.usage.prompt_tokens > (answer.usage.prompt_tokens if answer.usage else 0)


def test_only_allowed_tools_are_called(api: openai.OpenAI, model: str) -> None:
    """Each was a 400."""
    names = ("read", "write")
    flat_names = [{"type": "function", "name": name} for name in names]
    tools: Any = [{"type": "function", **function(name)} for name in names]
    asked: Any = {"model": model, "input": ASKED, "tools": tools, "parallel_tool_calls": False}
    for allowed in flat_names:
        choice: Any = {"type": "allowed_tools", "mode": "required", "tools": [allowed]}
        response = api.responses.create(**asked, tool_choice=choice)
        (call,) = Response.model_validate(response.to_dict(), strict=False).output
        assert call.type == "function_call"
        assert call.name == allowed["name"]
        assert response.to_dict()["tool_choice"] == choice

    chat: Any = {
        "model": model,
        "messages": [{"role": "user", "content": ASKED}],
        "tools": [{"type": "function", "function": function(name)} for name in names],
        "max_tokens": 1,
    }

    def num_prompt_tokens(**fields: Any) -> int:
        usage = api.chat.completions.create(**chat | fields).usage
        return int(usage.prompt_tokens if usage else 0)

    def allowing(mode: str, *names: str) -> Any:
        allowed = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}

    one = num_prompt_tokens(tools=chat["tools"][1:])
    assert num_prompt_tokens(tool_choice=allowing("auto", "write")) == one
    assert num_prompt_tokens(tool_choice=allowing("auto", *names)) == num_prompt_tokens() > one
    with pytest.raises(openai.BadRequestError, match="delete") as refused:
        num_prompt_tokens(tool_choice=allowing("required", "delete"))
    assert refused.value.param == "tool_choice"
