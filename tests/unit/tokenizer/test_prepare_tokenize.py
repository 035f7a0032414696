"""``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.preparers import CHAT, LIMITS, PROMPT, TOKENIZER, answer, ids, prepared, refused
from tokservice.tokenizer.prepare import Preparer
from tokservice.wire.messages import Route


def test_tokenize(preparer: Preparer, with_bos: Preparer) -> None:
    token_ids = TOKENIZER.encode("hello world").ids
    expected = {"count": len(token_ids), "max_model_len": 64, "tokens": token_ids, "token_strs": None}
    assert answer(preparer, Route.TOKENIZE, **PROMPT) == expected
    strings = answer(preparer, Route.TOKENIZE, **PROMPT, return_token_strs=True)["token_strs"]
    assert strings == TOKENIZER.encode("hello world").tokens
    assert answer(preparer, Route.TOKENIZE, prompt="")["tokens"] == []
    assert answer(with_bos, Route.TOKENIZE, prompt="")["tokens"] == [1]
    assert answer(with_bos, Route.TOKENIZE, prompt="", add_special_tokens=False)["tokens"] == []
    assert answer(preparer, Route.TOKENIZE, **CHAT)["tokens"] == ids(prepared(preparer, **CHAT))[0]
    assert answer(preparer, Route.TOKENIZE, prompt="a " * 1000)["count"] > LIMITS.max_model_len


def test_detokenize(preparer: Preparer) -> None:
    text = "<|im_start|>Grüße 😀"
    assert answer(preparer, Route.DETOKENIZE, tokens=TOKENIZER.encode(text).ids) == {"prompt": text}
    assert answer(preparer, Route.DETOKENIZE, tokens=[]) == {"prompt": ""}


@pytest.mark.parametrize("body", [{}, PROMPT | CHAT, {"messages": []}, PROMPT | {"n": 1}, PROMPT | {"tools": [1]}])
def test_tokenize_refuses(preparer: Preparer, body: dict[str, Any]) -> None:
    assert refused(preparer, body, Route.TOKENIZE).status == 400


def test_no_more_tokens_are_listed_than_an_answer_can_hold(preparer: Preparer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of 60 MB took 5 GB of a worker, and their list was lost on its way, so that the client waited."""
    requests: list[tuple[Route, str, dict[str, Any]]] = [
        (Route.TOKENIZE, "prompt", {"prompt": "hello world"}),
        (Route.TOKENIZE, "messages", CHAT),
        (Route.DETOKENIZE, "tokens", {"tokens": [5, 5, 5]}),
    ]
    monkeypatch.setattr("tokservice.tokenizer.prepare.MAX_LISTED_TOKENS", 1)
    for route, param, body in requests:
        error = refused(preparer, body, route)
        assert (error.code, error.param) == ("answer_too_large", param)
    monkeypatch.setattr("tokservice.tokenizer.prepare.MAX_LISTED_TOKENS", 100)
    monkeypatch.setattr("tokservice.tokenizer.prepare.MAX_ANSWER_BYTES", 10)
    for route, _, body in requests:
        assert refused(preparer, body, route).code == "answer_too_large"
