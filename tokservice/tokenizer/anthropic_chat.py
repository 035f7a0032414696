"""Bodies of Anthropic's Messages API as the chat bodies that ask for the same. Tokenizer worker; pure."""

from __future__ import annotations

from collections.abc import Sequence

from tokservice.protocol.anthropic_requests import (
    TEXT_NEUTRAL,
    CountTokensBody,
    InputMessage,
    InputTool,
    InputToolChoice,
    MessagesBody,
    OnlyText,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from tokservice.protocol.reading import refuse_unsupported
from tokservice.protocol.requests import ChatBody, FunctionCall, Message, TokenizeBody, ToolCall
from tokservice.protocol.tools import Function, FunctionName, NamedTool, Tool, ToolChoice
from tokservice.tokenizer.sampling import stop_strings
from tokservice.wire.errors import RequestError

ERROR = "Error: "  # introduces the result of a tool that failed


def chat_body(body: MessagesBody) -> ChatBody:
    """The chat request. Raises RequestError (400)."""
    choice = body.tool_choice
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
    )


def tokenize_body(body: CountTokensBody) -> TokenizeBody:
    """The request for the tokens of the same prompt. Raises RequestError (400)."""
    shows_tools = body.tool_choice is None or body.tool_choice.type != "none"
    return TokenizeBody(
        model=body.model,
        messages=_conversation(body),
        continue_final_message=_is_begun(body),
        tools=_tools(body.tools) if shows_tools else None,
    )


def _is_begun(body: CountTokensBody) -> bool:
    """Whether the last message is the beginning of the answer."""
    return bool(body.messages) and body.messages[-1].role == "assistant"


def _conversation(body: CountTokensBody) -> list[Message]:
    system = [Message(role="system", content=_text(body.system))] if body.system else []
    messages = [part for place, message in enumerate(body.messages) for part in _messages(place, message)]
    return [*system, *messages] if messages else []


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
            case ToolUseBlock():
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
    return (
        None
        if tools is None
        else [Tool(Function(tool.name, tool.description, tool.input_schema, tool.strict)) for tool in tools]
    )


def _tool_choice(choice: InputToolChoice | None) -> ToolChoice | None:
    if choice is None:
        return None
    if (choice.type == "tool") != (choice.name is not None):
        message = "'tool_choice' needs a 'name' where its type is \"tool\", and nowhere else."
        raise RequestError(message, param="tool_choice", code="invalid_value")
    match choice.type:
        case "tool":
            return NamedTool(FunctionName(str(choice.name)))
        case "any":
            return "required"
        case "none":
            return "none"
    return "auto"


def _misplaced(place: int, block: object) -> RequestError:
    kind = type(block).__struct_config__.tag  # type: ignore[attr-defined]
    message = f"messages[{place}]: a block of type '{kind}' cannot be in a message of this role."
    return RequestError(message, param="messages", code="invalid_value")
