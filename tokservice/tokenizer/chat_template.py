"""Chat templates: a conversation in, the text of the prompt out. Tokenizer worker; pure (time is passed in).

Templates come from the model's folder or the operator's file, never from a request, and run in jinja2's immutable
sandbox with the names that Hugging Face templates rely on: the filter ``tojson``, the functions ``raise_exception``
and ``strftime_now``, the tags ``break``, ``continue`` and ``generation``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokservice.tokenizer import template_marks, template_probes
from tokservice.tokenizer.model_files import read_json, read_text
from tokservice.tokenizer.own_tokens import OwnTokens
from tokservice.tokenizer.time_limit import TimeUp, time_limit
from tokservice.wire.errors import RequestError, StartupError

Messages = Sequence[Mapping[str, Any]]

MAX_RENDER_S = 5.0  # of CPU time: a template that loops for ever costs its request, not the worker
MAX_RENDERED_CHARS = 1 << 26

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
DEFAULT, FOR_TOOLS = "default", "tool_use"  # names of templates


class ChatTemplates(NamedTuple):
    """Those of a model: one for requests with tools, and one for others; mostly the same."""

    default: ChatTemplate
    for_tools: ChatTemplate

    def of(self, tools: Messages | None) -> ChatTemplate:
        """The one for a request with these tools."""
        return self.for_tools if tools else self.default


def load(model_dir: Path, override: str, own_tokens: OwnTokens | None = None) -> ChatTemplates | None:
    """The templates of a model's folder, or the operator's file in their place; None where there is none.

    ``own_tokens``: has the control tokens that a template writes marked. Raises StartupError.
    """
    config = read_json(model_dir / "tokenizer_config.json")
    sources = _sources(model_dir, override, config.get("chat_template"))
    special = {name: config[name] for name in SPECIAL_TOKENS if config.get(name)}
    contents = {name: token["content"] if isinstance(token, dict) else token for name, token in special.items()}

    def compiled(mark: Callable[[str], str] | None = None) -> dict[str, ChatTemplate]:
        return {
            name: ChatTemplate(source, contents, mark, for_tools=name == FOR_TOOLS) for name, source in sources.items()
        }

    templates = compiled()
    if own_tokens is not None and templates:
        written = [text for template in templates.values() for text in template.written]
        marked = compiled(own_tokens.mark([*contents.values(), *written]))
        for name, template in marked.items():
            own_tokens.check(template_probes.texts(template), template_probes.texts(templates[name]))
        templates = marked
    if DEFAULT not in templates:
        return None
    return ChatTemplates(templates[DEFAULT], templates.get(FOR_TOOLS, templates[DEFAULT]))


def _sources(model_dir: Path, override: str, configured: Any) -> dict[str, str]:
    """The templates that are used, by name.

    In order: ``override``; ``chat_template.jinja``, and beside it ``additional_chat_templates``; what is ``configured``
    in ``tokenizer_config.json``, one template or several with names; ``chat_template.json``.
    """
    file = model_dir / "chat_template.jinja"
    if override:
        return {DEFAULT: read_text(Path(override))}
    if file.exists():
        files = {DEFAULT: file, FOR_TOOLS: model_dir / "additional_chat_templates" / f"{FOR_TOOLS}.jinja"}
        return {name: read_text(path) for name, path in files.items() if path.exists()}
    if configured is None:
        configured = read_json(model_dir / "chat_template.json").get("chat_template")
    try:
        named = {one["name"]: one["template"] for one in configured} if isinstance(configured, list) else {}
    except (TypeError, KeyError) as error:
        raise StartupError(f"the list of chat templates is broken: {error!r}") from error
    named = named or {DEFAULT: configured}
    if not all(isinstance(source, str | None) for source in named.values()):
        raise StartupError("a chat template is no text")
    return {name: named[name] for name in (DEFAULT, FOR_TOOLS) if named.get(name) is not None}


class ChatTemplate:
    """A compiled template."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        mark: Callable[[str], str] | None = None,
        *,
        for_tools: bool = False,
    ) -> None:
        """``special_tokens``: bos_token, eos_token and so on, as the template names them. ``mark``: replaces the
        control tokens in a text that the template writes. ``for_tools``: it is used for requests with tools alone.
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
            self.written = template_marks.written(tree)
            if mark is not None:
                template_marks.rewrite(tree, mark)
                special_tokens = {name: mark(token) for name, token in special_tokens.items()}
            self._template = environment.from_string(tree, globals=dict(special_tokens))
        except (jinja2.TemplateError, RecursionError) as error:
            raise StartupError(f"the chat template is broken: {error}") from error
        self.source = source
        self._reserved = {"messages", "tools", "add_generation_prompt", "strftime_now", *environment.globals}
        self._reserved |= set(special_tokens)
        self._wants_parts = False
        probe = template_probes.Probe(self, for_tools=for_tools)
        self._wants_parts = probe.shows_parts_alone()
        self.shows = probe.shown()

    def render(
        self,
        messages: Messages,
        *,
        now: float,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt's text. The contents of messages are texts, or ``shows.silence``. Raises RequestError (400) with
        the template's own complaint.
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
