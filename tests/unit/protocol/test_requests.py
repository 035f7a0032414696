from __future__ import annotations

import msgspec
import pytest

from tokservice.protocol.reading import Reader
from tokservice.protocol.requests import ChatBody, CompletionBody
from tokservice.wire.errors import RequestError

COMPLETIONS = Reader(CompletionBody)


def refused(body: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        COMPLETIONS.read(body)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (b"", None, "invalid_json"),
        (b"[]", None, "invalid_value"),
        (b"{}", "prompt", "missing_field"),
        (b'{"prompt":null}', "prompt", "invalid_value"),
        (b'{"prompt":["a",{}]}', "prompt", "invalid_value"),
        (b'{"prompt":[[1,"x"]]}', "prompt", "invalid_value"),
        (b'{"prompt":"a","logit_bias":{"x":1}}', "logit_bias", "invalid_value"),
        (b'{"prompt":"a","stream_options":{"x":1}}', "stream_options", "unknown_field"),
        (b'{"prompt":"a","sto":"x"}', "sto", "unknown_field"),
        (b'{"prompt":"a","a`b $.c":"x"}', "a", "unknown_field"),
        (b'{"prompt":"a","echo":0}', "echo", "invalid_value"),
        (b'{"prompt":"a","use_beam_search":true}', "use_beam_search", "unsupported"),
        (b'{"prompt":"a","use_beam_search":0}', "use_beam_search", "unsupported"),
        (b'{"prompt":"a","suffix":"' + b"x" * 100 + b'"}', "suffix", "unsupported"),
    ],
)
def test_the_top_level_field_is_named(body: bytes, param: str | None, code: str) -> None:
    error = refused(body)
    assert (error.param, error.code) == (param, code)


def test_the_message_keeps_the_whole_path() -> None:
    assert "$.prompt[0][1]" in refused(b'{"prompt":[[1,"x"]]}').message


def test_nesting_beyond_the_parsers_stack_is_a_client_error() -> None:
    """The guard before the parser refuses it first; without it the answer is still no crash."""
    with pytest.raises(RequestError):
        Reader(ChatBody).read(b'{"messages":[],"chat_template_kwargs":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}")


def test_unset_and_null_are_the_same() -> None:
    fields = [name for name in CompletionBody.__struct_fields__ if name != "prompt"]
    nulls = msgspec.json.encode({"prompt": "a"} | dict.fromkeys(fields))
    assert COMPLETIONS.read(nulls) == COMPLETIONS.read(b'{"prompt":"a"}')
