"""fastokens against the reference on real tokenizers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import random_texts, real_tokenizers
from tokservice.tokenizer import self_test
from tokservice.tokenizer.backends import Backend
from tokservice.tokenizer.fastokens_backend import FastokensBackend
from tokservice.tokenizer.hf_backend import HuggingFaceBackend
from tokservice.tokenizer.length_guard import max_chars_per_token

NUM_TEXTS = 300
NUM_TEXTS_SLOW = 20_000


@dataclass(frozen=True)
class Pair:
    """Two back ends of one tokenizer."""

    fast: Backend
    reference: Backend
    typed: list[str]  # some of the added tokens
    max_chars_per_token: int

    def check(self, text: str, *, both: bool) -> None:
        for other in (False, True):  # special tokens added and typed ones as text, or neither
            ids = self.fast.encode(text, add_special_tokens=other, special_as_text=other)
            expected = self.reference.encode(text, add_special_tokens=other, special_as_text=other)
            assert ids == expected, ascii(text)
        assert len(text) <= self.max_chars_per_token * len(ids), ascii(text)
        if both:
            assert self.fast.decode(ids) == self.reference.decode(ids), ascii(text)


@pytest.fixture(scope="module")
def fast() -> Iterator[dict[str, Future[FastokensBackend]]]:
    """Back ends under test. Each takes seconds to load, without the GIL: beside the tests of those before it."""
    with ThreadPoolExecutor(1) as loader:
        yield {name: loader.submit(load_fast, name) for name in real_tokenizers.NAMES}
        loader.shutdown(cancel_futures=True)  # of tests that were not selected, or had failed


def load_fast(name: str) -> FastokensBackend:
    return FastokensBackend(real_tokenizers.model_dir(name) / "tokenizer.json")


@pytest.fixture(scope="module", params=real_tokenizers.NAMES)
def pair(request: pytest.FixtureRequest, fast: dict[str, Future[FastokensBackend]]) -> Pair:
    path = real_tokenizers.model_dir(request.param) / "tokenizer.json"
    reference = HuggingFaceBackend(path)
    bound = max_chars_per_token(orjson.loads(path.read_bytes()))
    assert bound is not None
    added = sorted(token.content for token in reference.added_tokens().values())
    return Pair(fast[request.param].result(), reference, added[:: max(1, len(added) // 60)], bound)


def test_the_self_test_passes(pair: Pair) -> None:
    assert self_test.first_difference(pair.fast, pair.reference) == ""


def test_random_texts(pair: Pair) -> None:
    for text in random_texts.texts(1, NUM_TEXTS, pair.typed):
        pair.check(text, both=True)


@given(data=st.data())
def test_any_text(pair: Pair, data: st.DataObject) -> None:
    """Surrogates aside, which no JSON body can bring."""
    character = st.characters(exclude_categories=["Cs"])
    pieces = st.one_of(st.text(character), st.sampled_from(pair.typed), st.text(" \n\t<|>'a1é\u0301日", min_size=1))
    pair.check("".join(data.draw(st.lists(pieces, max_size=8))), both=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_random_texts(pair: Pair) -> None:
    for text in random_texts.texts(2, NUM_TEXTS_SLOW, pair.typed):
        pair.check(text, both=False)
