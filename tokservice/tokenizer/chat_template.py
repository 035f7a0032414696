"""Chat templates: a conversation in, the text of the prompt out. Tokenizer worker; pure (time is passed in).

Templates come from the model's folder or the operator's file, never from a request, and run in jinja2's immutable
sandbox with the names that Hugging Face templates rely on: the filter ``tojson``, the functions ``raise_exception``
and ``strftime_now``, the tags ``break``, ``continue`` and ``generation``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokservice.tokenizer import template_marks
from tokservice.tokenizer.model_files import read_json, read_text
from tokservice.tokenizer.own_tokens import OwnTokens
from tokservice.tokenizer.time_limit import TimeUp, time_limit
from tokservice.wire.errors import RequestError, StartupError

Messages = Sequence[Mapping[str, Any]]

MAX_RENDER_S = 5.0  # of CPU time: a template that loops for ever costs its request, not the worker
MAX_RENDERED_CHARS = 1 << 26

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load(model_dir: Path, override: str, own_tokens: OwnTokens | None = None) -> ChatTemplate | None:
    """The template of a model's folder, or the operator's file in its place; None where there is none.

    In order: ``override``, ``chat_template.jinja``, ``chat_template`` in ``tokenizer_config.json`` (of several
    templates there the one called "default"). ``own_tokens``: has the control tokens that the template writes
    marked. Raises StartupError.
    """
    config = read_json(model_dir / "tokenizer_config.json")
    file = Path(override) if override else model_dir / "chat_template.jinja"
    source = config.get("chat_template")
    if override or file.exists():
        source = read_text(file)
    elif isinstance(source, list):
        source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
    if source is None:
        return None
    special = {name: config[name] for name in SPECIAL_TOKENS if config.get(name)}
    contents = {name: token["content"] if isinstance(token, dict) else token for name, token in special.items()}
    template = ChatTemplate(source, contents)
    if own_tokens is None:
        return template
    marked = ChatTemplate(source, contents, own_tokens)
    own_tokens.check(_probes(marked), _probes(template))
    return marked


class ChatTemplate:
    """A compiled template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], own_tokens: OwnTokens | None = None) -> None:
        """``special_tokens``: bos_token, eos_token and so on, as the template names them. ``own_tokens``: see load.
        Raises StartupError.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        try:
            tree = environment.parse(source)
            self.variables = frozenset(meta.find_undeclared_variables(tree))
            if own_tokens is not None:
                mark = own_tokens.mark([*special_tokens.values(), *template_marks.written(tree)])
                template_marks.rewrite(tree, mark)
                special_tokens = {name: mark(token) for name, token in special_tokens.items()}
            self._template = environment.from_string(tree, globals=dict(special_tokens))
        except (jinja2.TemplateError, RecursionError) as error:
            raise StartupError(f"the chat template is broken: {error}") from error
        self.source = source
        self.knows_tools = "tools" in source
        self._reserved = {"messages", "tools", "add_generation_prompt", "strftime_now", *environment.globals}
        self._reserved |= set(special_tokens)
        # A template that does not know the role would drop such a message, or refuse it.
        self.knows_developer_role = "developer" in source
        self._wants_parts = False
        self._wants_parts = self._shows_parts_alone()
        form = self._form_of_calls()
        self.shows_calls = form is not None or "tool_calls" in source
        # The content of a message that calls tools and says nothing, and whether their arguments are JSON text.
        self.silence, self.wants_arguments_as_text = form or ("", False)
        self.takes_late_system = self._shows_late_system()
        self.shows_results = self.shows_calls or self._shows_results()

    def render(
        self,
        messages: Messages,
        *,
        now: float,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt's text. The contents of messages are texts, or ``silence``. Raises RequestError (400) with the
        template's own complaint.
        """
        variables = variables or {}
        if self._wants_parts:
            messages = [{**message, "content": _parts(message["content"] or "")} for message in messages]
        if taken := self._reserved & variables.keys():
            raise RequestError(f"'{min(taken)}' cannot be set by a request.", param="chat_template_kwargs")
        try:
            with time_limit(MAX_RENDER_S):
                return self._render(
                    {
                        **variables,
                        "messages": messages,
                        "tools": tools,
                        "add_generation_prompt": add_generation_prompt,
                        "strftime_now": lambda form: datetime.fromtimestamp(now).strftime(form),
                    }
                )
        except TimeUp as error:
            message = f"The chat template needs more than {MAX_RENDER_S:g} s for this conversation."
            raise RequestError(message, param="messages", code="template_timeout") from error
        except jinja2.TemplateError as error:
            raise RequestError(str(error) or "The chat template failed.", param="messages") from error
        except Exception as error:  # whatever an operation inside a template raises
            message = f"The chat template cannot render this conversation: {error}"
            raise RequestError(message[:500], param="messages") from error

    def _render(self, variables: Mapping[str, Any]) -> str:
        """As ``render`` of the library, but of bounded length."""
        pieces = []
        num_chars = 0
        for piece in self._template.generate(variables):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > MAX_RENDERED_CHARS:
                raise jinja2.TemplateRuntimeError(f"the prompt has more than {MAX_RENDERED_CHARS} characters")
        return "".join(pieces)

    def _shows_parts_alone(self) -> bool:
        """Whether the template goes through the parts of a content, and so leaves out one that is a text."""
        shown = []
        for content in ("probe", _parts("probe")):
            try:
                text = self.render([{"role": "user", "content": content}], now=0, add_generation_prompt=False)
            except RequestError:
                text = ""
            shown.append("probe" in text)
        return shown == [False, True]

    def _form_of_calls(self) -> tuple[str | None, bool] | None:
        """How a message must be for its calls to be shown: the content of one that says nothing, and whether arguments
        are JSON text; None: they are not shown in any form.

        Some templates show calls only beside a content that is none, some put arguments between quotes as they are: of
        a mapping Python's own form, or an error, would come of it.
        """
        for content in ("", None):
            for arguments in ({"probed_key": "probed_value"}, '{"probed_key": "probed_value"}'):
                function = {"name": "probe", "arguments": arguments}
                call = {"id": "call00000", "type": "function", "function": function}
                turns: Messages = [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": content, "tool_calls": [call]},
                ]
                try:
                    text = self.render(turns, now=0, add_generation_prompt=False)
                except RequestError:
                    continue
                if "probed_key" in text and "probed_value" in text and "'probed_key'" not in text:
                    return content, isinstance(arguments, str)
        return None

    def _shows_results(self) -> bool:
        """Whether what a tool has said can be seen: some templates refuse its role, others leave it out."""
        turns = [{"role": role, "content": f"a probed {role}"} for role in ("user", "assistant", "tool")]
        try:
            return turns[-1]["content"] in self.render(turns, now=0, add_generation_prompt=False)
        except RequestError:
            return False

    def _shows_late_system(self) -> bool:
        """Whether a system message can stand behind others: some templates refuse it, leave it out, or show it at the
        beginning, where each new one would keep a conversation out of the prefix cache.
        """
        first, user, assistant = ({"role": role, "content": "a turn"} for role in ("system", "user", "assistant"))
        late = {"role": "system", "content": "a late one"}
        for before, after in (([first, user], []), ([first, user, assistant], [user])):
            try:
                text = self.render([*before, late, *after], now=0, add_generation_prompt=True)
            except RequestError:
                return False
            earlier, found, _ = text.partition(late["content"])
            if not found or earlier.count(first["content"]) < len(before):
                return False
        return True


def _probes(template: ChatTemplate) -> list[str]:
    """Some conversations as the template writes them; empty where it refuses one."""
    system, user, again = ({"role": role, "content": f"a {role} b"} for role in ("system", "user", "user"))
    assistant = {"role": "assistant", "content": "an answer", "reasoning_content": "a thought"}
    arguments: Any = '{"key": "value"}' if template.wants_arguments_as_text else {"key": "value"}
    call = {"id": "call00000", "type": "function", "function": {"name": "probe", "arguments": arguments}}
    calling = {"role": "assistant", "content": template.silence, "tool_calls": [call]}
    result = {"role": "tool", "content": "a result", "tool_call_id": "call00000", "name": "probe"}
    parameters = {"type": "object", "properties": {"key": {"type": "string", "description": "a key"}}}
    tool = {"type": "function", "function": {"name": "probe", "description": "a tool", "parameters": parameters}}
    conversations: list[Messages] = [
        [user],
        [system, user, assistant, again],
        [user, calling, result],
        [system, user, assistant, again, calling, result, assistant],
    ]
    texts = []
    for conversation in conversations:
        for tools in (None, [tool]):
            for add_generation_prompt in (False, True):
                try:
                    text = template.render(
                        conversation, now=0, add_generation_prompt=add_generation_prompt, tools=tools
                    )
                except RequestError:
                    text = ""
                texts.append(text)
    return texts


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON as the models saw it in training: not escaped for HTML, as jinja2's own filter would."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


class _GenerationTag(Extension):
    """``{% generation %}``: marks the assistant's text for training; here the text alone matters."""

    tags = {"generation"}  # noqa: RUF012 (declared so by the base class)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
