from __future__ import annotations

import json

import pytest

from tokservice.protocol.json_text import json_text
from tokservice.protocol.parts import Usage
from tokservice.protocol.responses import usage_json


@pytest.mark.parametrize(
    "text",
    ["", "plain", 'quo"te\\', "\x00\x1f\x7f", "\r\n\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029", "日本語 😀", "\\u2028"],
)
def test_texts_survive_and_stay_on_one_line(text: str) -> None:
    data = json_text(text)
    assert json.loads(data) == text
    assert len((data.decode() + "x").splitlines()) == 1


def test_usage() -> None:
    assert json.loads(usage_json(Usage(5, 7, 3, 2))) == {
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
