"""Guides, tools and thoughts."""

from __future__ import annotations

from pathlib import Path

from tests.helpers import tiny_tokenizers
from tests.helpers.preparers import CHAT, LIMITS, PROMPT, TOKENIZER, TOOL, VOCAB_SIZE, ids, make, prepared, refused
from tokservice.protocol import context as contexts
from tokservice.runtime.config import TokenizerConfig
from tokservice.tokenizer.guides import ANY_OBJECT
from tokservice.tokenizer.prepare import Preparer
from tokservice.wire.messages import EngineLimits


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
