"""Bodies of Anthropic's Messages API as the chat bodies that ask for the same. Tokenizer worker; pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tokservice.protocol.anthropic_requests import (
    OUTPUT_CONFIG_NEUTRAL,
    TEXT_NEUTRAL,
    TOOL_NEUTRAL,
    TOOL_RESULT_NEUTRAL,
    TOOL_USE_NEUTRAL,
    AdaptiveThinking,
    CountTokensBody,
    DisabledThinking,
    EnabledThinking,
    InputMessage,
    InputTool,
    InputToolChoice,
    JsonOutput,
    MessagesBody,
    OnlyText,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from tokservice.protocol.guide_fields import JsonSchema, ResponseFormat
from tokservice.protocol.reading import refuse_unsupported
from tokservice.protocol.requests import ChatBody, FunctionCall, Message, TokenizeBody, ToolCall
from tokservice.protocol.tools import Function, Tool, ToolChoice, ToolDemand, ToolName
from tokservice.tokenizer.reasoning import effort_variables, thinking_variables
from tokservice.tokenizer.sampling import stop_strings
from tokservice.tokenizer.traits import Traits
from tokservice.wire.errors import RequestError

ERROR = "Error: "  # introduces the result of a tool that failed
ACCOUNTING = "x-anthropic-billing-header:"  # Claude Code's first line of the system prompt: another one in each request


def chat_body(body: MessagesBody, traits: Traits) -> ChatBody:
    """The chat request. Raises RequestError (400)."""
    choice = body.tool_choice
    output = _output_format(body)
    return ChatBody(
        model=body.model,
        messages=_conversation(body),
        continue_final_message=_is_begun(body),
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=list(stop_strings(body.stop_sequences, "stop_sequences")),
        stream=body.stream,
        tools=_tools(body.tools),
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        response_format=ResponseFormat("json_schema", JsonSchema(output.schema)) if output else None,
        chat_template_kwargs=_variables(body, traits),
    )


def tokenize_body(body: CountTokensBody, traits: Traits) -> TokenizeBody:
    """The request for the tokens of the same prompt. Raises RequestError (400)."""
    shows_tools = body.tool_choice is None or body.tool_choice.type != "none"
    return TokenizeBody(
        model=body.model,
        messages=_conversation(body),
        continue_final_message=_is_begun(body),
        tools=_tools(body.tools) if shows_tools else None,
        chat_template_kwargs=_variables(body, traits),
    )


def omits_thoughts(body: MessagesBody) -> bool:
    """Whether the answer says that there were thoughts, and not which."""
    thinking = body.thinking
    return isinstance(thinking, AdaptiveThinking | EnabledThinking) and thinking.display == "omitted"


def applied_edits(body: CountTokensBody) -> dict[str, Any]:
    """What the answer says about the conversation's edits, where they are asked for."""
    return {} if body.context_management is None else {"context_management": {"applied_edits": []}}


def in_own_words(error: RequestError) -> RequestError:
    """What is wrong with the chat request, by the name that the Messages API has for its field."""
    return dataclasses.replace(error, message=error.message.replace("'response_format'", "'output_config'"))


def _variables(body: CountTokensBody, traits: Traits) -> dict[str, Any]:
    """The template's: without any of a name that it reads, effort and thinking are the model's own affair."""
    schema = _output_format(body)
    effort = body.output_config and body.output_config.effort
    variables = effort_variables(traits, effort) if effort else {}
    if body.thinking is not None:  # an answer that follows a schema has no room for thoughts
        thinks = not isinstance(body.thinking, DisabledThinking) and schema is None
        variables |= thinking_variables(traits, thinks=thinks)
    return variables


def _output_format(body: CountTokensBody) -> JsonOutput | None:
    if body.output_config is None:
        return body.output_format
    refuse_unsupported(body.output_config, OUTPUT_CONFIG_NEUTRAL, param="output_config")
    if body.output_config.format and body.output_format:
        message = "'output_format' and 'output_config' with a 'format' exclude each other."
        raise RequestError(message, param="output_format", code="invalid_value")
    return body.output_config.format or body.output_format


def _is_begun(body: CountTokensBody) -> bool:
    """Whether the last message is the beginning of the answer."""
    return bool(body.messages) and body.messages[-1].role == "assistant"


def _conversation(body: CountTokensBody) -> list[Message]:
    prompt = _system_prompt(body.system or "")
    system = [Message(role="system", content=prompt)] if prompt else []
    messages = [part for place, message in enumerate(body.messages) for part in _messages(place, message)]
    return [*system, *messages] if messages else []


def _system_prompt(system: str | Sequence[OnlyText]) -> str:
    """Without a first line that only counts requests: no two prompts would begin alike."""
    texts = [system] if isinstance(system, str) else [_text([block]) for block in system]
    if texts and texts[0].startswith(ACCOUNTING):
        texts[0] = texts[0].partition("\n")[2]
    return "".join(texts)


def _messages(place: int, message: InputMessage) -> list[Message]:
    """A message of the user becomes several where it holds results of tools."""
    if isinstance(message.content, str):
        return [Message(role=message.role, content=message.content)]
    if message.role == "assistant":
        return [_assistant_message(place, message)]
    if message.role == "system":
        return [_system_message(place, message.content)]
    messages: list[Message] = []
    texts: list[TextBlock] = []
    for block in message.content:
        match block:
            case TextBlock():
                texts.append(block)
            case ToolResultBlock():
                refuse_unsupported(block, TOOL_RESULT_NEUTRAL, param="messages")
                messages += _user_message(texts)
                texts = []
                text = (ERROR if block.is_error else "") + _text(block.content or "")
                messages.append(Message(role="tool", content=text, tool_call_id=block.tool_use_id))
            case _:
                raise _misplaced(place, block)
    return [*messages, *_user_message(texts)] or [Message(role="user", content="")]


def _system_message(place: int, content: Sequence[object]) -> Message:
    texts = []
    for block in content:
        if not isinstance(block, TextBlock):
            raise _misplaced(place, block)
        texts.append(block)
    return Message(role="system", content=_text(texts))


def _user_message(texts: list[TextBlock]) -> list[Message]:
    return [Message(role="user", content=_text(texts))] if texts else []


def _assistant_message(place: int, message: InputMessage) -> Message:
    texts, thoughts, calls = [], [], []
    for block in message.content:
        match block:
            case TextBlock():
                texts.append(block)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case RedactedThinkingBlock():
                pass
            case ToolUseBlock():
                refuse_unsupported(block, TOOL_USE_NEUTRAL, param="messages")
                calls.append(ToolCall(id=block.id, function=FunctionCall(block.name, block.input)))
            case _:
                raise _misplaced(place, block)
    reasoning = "".join(thoughts) or None
    return Message(role="assistant", content=_text(texts), reasoning_content=reasoning, tool_calls=calls or None)


def _text(content: str | Sequence[TextBlock | OnlyText]) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        refuse_unsupported(block, TEXT_NEUTRAL, param="messages")
    return "".join(block.text for block in content)


def _tools(tools: list[InputTool] | None) -> list[Tool] | None:
    return None if tools is None else list(map(_tool, tools))


def _tool(tool: InputTool) -> Tool:
    """Examples of the input become a part of its schema, where the model sees them."""
    refuse_unsupported(tool, TOOL_NEUTRAL, param="tools")
    examples = {"examples": tool.input_examples} if tool.input_examples else {}
    return Tool(Function(tool.name, tool.description, tool.input_schema | examples, tool.strict))


def _tool_choice(choice: InputToolChoice | None) -> ToolChoice | None:
    if choice is None:
        return None
    if (choice.type == "tool") != (choice.name is not None):
        message = "'tool_choice' needs a 'name' where its type is \"tool\", and nowhere else."
        raise RequestError(message, param="tool_choice", code="invalid_value")
    match choice.type:
        case "tool":
            return ToolDemand(ToolName(str(choice.name)))
        case "any":
            return "required"
        case "none":
            return "none"
    return "auto"


def _misplaced(place: int, block: object) -> RequestError:
    kind = type(block).__struct_config__.tag  # type: ignore[attr-defined]
    message = f"messages[{place}]: a block of type '{kind}' cannot be in a message of this role."
    return RequestError(message, param="messages", code="invalid_value")
