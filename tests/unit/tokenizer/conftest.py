from __future__ import annotations

import pytest

from tests.helpers import tiny_tokenizers
from tests.helpers.own_cache import own_cache
from tests.helpers.preparers import make
from tokservice.tokenizer.prepare import Preparer

__all__ = ["own_cache"]


@pytest.fixture(scope="module")
def preparer(tmp_path_factory: pytest.TempPathFactory) -> Preparer:
    return make(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> Preparer:
    return make(
        tmp_path_factory.mktemp("model"),
        tiny_tokenizers.byte_fallback(),
        chat_template="{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}",
        special_tokens={"bos_token": "<s>"},
    )
