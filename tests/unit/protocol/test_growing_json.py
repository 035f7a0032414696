from __future__ import annotations

import json

import pytest

from tokservice.protocol import growing_json
from tokservice.protocol.growing_json import JsonList, JsonString, Written, one_string
from tokservice.protocol.logprobs import (
    CHAT_LOGPROBS,
    COMPLETION_LOGPROBS,
    GENERATE_LOGPROBS,
    PROMPT_LOGPROBS,
    Form,
    Logprobs,
)
from tokservice.protocol.token_entry import Alternative, TokenEntry


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing_json, "PIECE_BYTES", 8)


def test_no_piece_is_large_and_none_is_copied_twice() -> None:
    written = Written()
    for _ in range(100):
        written.add(b"abc")
    pieces = list(written)
    assert b"".join(pieces) == b"abc" * 100
    assert len(written) == 300
    assert max(map(len, pieces)) < 8 + 3
    written.add(b"d")
    assert all(new is old for new, old in zip(written, pieces[:-1], strict=False))


def test_a_string_is_that_of_its_texts() -> None:
    string = JsonString()
    texts = ["", 'quo"te\\', "\u2028 é", "日本語 😀", "x" * 20]
    assert [json.loads(string.add(text)) for text in texts] == texts
    assert json.loads(b"".join(string)) == "".join(texts)
    assert json.loads(b"".join(one_string([string, JsonString(), string]))) == "".join(texts) * 2
    assert b"".join(one_string([])) == b'""'


def test_a_list_is_that_of_its_values_and_its_copy_grows_apart() -> None:
    values = JsonList()
    assert b"".join(values) == b"[]"
    for some in ([], [1, "two"], [], [None], [{"a": [3]}] * 4):
        assert json.loads(values.extend(some)) == some
    before = json.loads(b"".join(values))
    assert before == [1, "two", None, *[{"a": [3]}] * 4]
    copy = values.copy()
    copy.extend([5])
    values.join(b"[6,7]")
    assert json.loads(b"".join(copy)) == [*before, 5]
    assert json.loads(b"".join(values)) == [*before, 6, 7]


@pytest.mark.parametrize("form", [COMPLETION_LOGPROBS, CHAT_LOGPROBS, GENERATE_LOGPROBS, PROMPT_LOGPROBS])
@pytest.mark.parametrize("cuts", [(), (0,), (1,), (2, 3), (0, 1, 2, 3)])
def test_logprobs_do_not_depend_on_how_they_came(form: Form, cuts: tuple[int, ...]) -> None:
    best = [Alternative(7, "x\u2028", b"x", -0.5), Alternative(1, "b", b"\xff", -2.0)]
    scored = [TokenEntry(count, "b", b"b", count, -1.5, best[:count]) for count in range(3)]
    entries = [TokenEntry(0, "a", b"a", 0), *scored]
    beginning = Logprobs(form)
    beginning.extend(entries[:2])
    grown = Logprobs(form)
    for start, end in zip((0, *cuts), (*cuts, len(entries)), strict=True):
        grown.extend(entries[start:end])
    assert b"".join(grown) == form.written(entries)
    behind = Logprobs(form, beginning)
    behind.extend(entries[2:])
    assert b"".join(behind) == form.written(entries)
    assert b"".join(beginning) == form.written(entries[:2])
