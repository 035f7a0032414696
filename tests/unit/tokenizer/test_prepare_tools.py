"""Guides, tools and thoughts."""

from __future__ import annotations

from pathlib import Path

from tests.helpers import tiny_tokenizers
from tests.helpers.preparers import (
    CHAT,
    LIMITS,
    PROMPT,
    TOKENIZER,
    TOOL,
    VOCAB_SIZE,
    answer,
    ids,
    make,
    prepared,
    refused,
)
from tokservice.protocol import context as contexts
from tokservice.runtime.config import TokenizerConfig
from tokservice.tokenizer.guides import ANY_OBJECT
from tokservice.tokenizer.prepare import Preparer
from tokservice.wire.messages import EngineLimits, Route


def test_guides_reach_the_engine(preparer: Preparer) -> None:
    sampling = prepared(preparer, **CHAT, response_format={"type": "json_object"}).sampling
    assert (sampling.guide_kind, sampling.guide) == ("json_schema", ANY_OBJECT)
    assert prepared(preparer, **PROMPT, guided_regex="[0-9]+").sampling.guide_kind == "regex"


def test_tools_are_shown_even_where_the_template_knows_none(tmp_path: Path) -> None:
    preparer = make(tmp_path)
    preparer.set_limits(EngineLimits(max_model_len=4096, vocab_size=VOCAB_SIZE))
    result = prepared(preparer, **CHAT, tools=[TOOL])
    assert '"name": "f"' in TOKENIZER.decode(ids(result)[0])
    context = contexts.decode(result.context)
    assert (context.tool_format, context.tool_names) == ("hermes", ("f",))
    assert prepared(preparer, **CHAT, tools=[TOOL], tool_choice="none").prompts == prepared(preparer, **CHAT).prompts


def test_a_template_for_tools_is_used_where_there_are_some(tmp_path: Path) -> None:
    """The other one was used for all: calls were asked for in words, in another form than the model's own."""
    for_tools = (
        "{% for tool in tools %}<tool>{{ tool.function.name }}</tool>{% endfor %}[TOOL_CALLS]"
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    )
    named = [{"name": "default", "template": "<|im_start|>{{ messages[0].content }}"}]
    named.append({"name": "tool_use", "template": for_tools})
    for settings in (TokenizerConfig(), TokenizerConfig(allow_special_in_content=False)):
        preparer = make(tmp_path, settings=settings, chat_template=named)
        shown = prepared(preparer, **CHAT, tools=[TOOL])
        text = TOKENIZER.decode(ids(shown)[0], skip_special_tokens=False)
        assert text == "<tool>f</tool>[TOOL_CALLS]<|im_start|>hello<|im_end|>"
        assert contexts.decode(shown.context).tool_format == "mistral"
        plain = prepared(preparer, **CHAT)
        assert TOKENIZER.decode(ids(plain)[0], skip_special_tokens=False) == "<|im_start|>hello"
        assert prepared(preparer, **CHAT, tools=[TOOL], tool_choice="none").prompts == plain.prompts
        assert answer(preparer, Route.TOKENIZE, **CHAT, tools=[TOOL])["count"] == shown.num_prompt_tokens


def test_tools_in_words_are_called_in_the_form_of_these_words(tmp_path: Path) -> None:
    """Whatever else the template speaks of: answers were searched for calls of another form."""
    preparer = make(tmp_path, chat_template="{# tools [TOOL_CALLS] #}{{ messages[0].content }}")
    preparer.set_limits(EngineLimits(max_model_len=4096, vocab_size=VOCAB_SIZE))
    result = prepared(preparer, **CHAT, tools=[TOOL])
    assert '"name": "f"' in TOKENIZER.decode(ids(result)[0])
    assert contexts.decode(result.context).tool_format == "hermes"


def test_a_demanded_call_and_a_guide_exclude_each_other(preparer: Preparer) -> None:
    """But not a response format, which agents ask for in each request: it is for what the model says."""
    body = CHAT | {"tools": [TOOL], "tool_choice": "required", "truncate_prompt_tokens": 50}
    assert refused(preparer, body | {"guided_regex": "a"}).param == "guided_regex"
    form = {"response_format": {"type": "json_object"}}
    assert prepared(preparer, **body, **form).sampling.guide == prepared(preparer, **body).sampling.guide


def test_reasoning_by_option(tmp_path: Path) -> None:
    tiny_tokenizers.write_model(
        tmp_path, TOKENIZER, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}{{ opened }}"
    )
    thinking = Preparer(
        model_dir=tmp_path,
        model_name="tiny",
        chat_template_file="",
        settings=TokenizerConfig(),
        reasoning_parser="think",
    )
    thinking.set_limits(LIMITS)
    assert contexts.decode(prepared(thinking, **CHAT).context).reasoning == "tagged"
    opened = CHAT | {"chat_template_kwargs": {"opened": "<think>\n"}}
    assert contexts.decode(prepared(thinking, **opened).context).reasoning == "open"
    guided = opened | {"response_format": {"type": "json_object"}}
    assert contexts.decode(prepared(thinking, **guided).context).reasoning == ""
