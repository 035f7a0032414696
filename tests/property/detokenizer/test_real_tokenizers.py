"""Generated tokens of real vocabularies: what is streamed adds up to the plain answer, and that is the text that the
library decodes, cut at the earliest stop string."""

from __future__ import annotations

import json
import random
from codecs import utf_8_decode
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from tokenizers import Tokenizer

from tests.helpers import random_texts, real_tokenizers
from tests.helpers.contexts import context
from tests.helpers.sse import chunks, text_of
from tests.property.detokenizer.test_stop import longest_live_suffix, reference
from tokservice.detokenizer import vocabulary
from tokservice.detokenizer.respond import Responder
from tokservice.detokenizer.vocabulary import Vocabulary
from tokservice.wire.messages import FinishReason, Route

NAMES = ("qwen3", "llama3_1", "gemma3", "llama2", real_tokenizers.SMOLLM2)
EMOJI = "😀🎉👩‍👩‍👧‍👦🏳️‍🌈🇩🇪👍🏽❤️1️⃣🧑🏿‍🚀日本語é\u0301ก็"


@dataclass(frozen=True)
class Model:
    """A real tokenizer, and our table of it."""

    tokenizer: Tokenizer
    table: Vocabulary
    special_ids: Sequence[int]
    fragment_ids: Sequence[int]  # tokens that are no whole characters


@dataclass(frozen=True)
class Case:
    """The output of a model, and how it is asked for."""

    token_ids: list[int]
    stops: tuple[str, ...]
    include_stop: bool
    skip_special: bool


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> Model:
    folder = real_tokenizers.model_dir(request.param)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    table = vocabulary.load(folder)
    special = [key for key, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    fragments = [key for key, data in enumerate(table.all_bytes) if "\ufffd" in data.decode("utf-8", "replace")]
    assert special
    assert fragments
    return Model(tokenizer, table, special, fragments)


def data_of(model: Model, token_ids: list[int], *, skip_special: bool) -> bytes:
    """The bytes of tokens at the beginning of a text."""
    table = model.table.table(skip_special=skip_special)
    data = b"".join(table[token_id] for token_id in token_ids)
    return data.removeprefix(b" ") if model.table.strips_leading_space else data


def text_of_all(model: Model, token_ids: list[int], *, skip_special: bool) -> str:
    """What the library decodes. Of a run of byte tokens that is not valid UTF-8 it makes one U+FFFD for each byte, good
    ones too: there the tokens' bytes decide."""
    data = data_of(model, token_ids, skip_special=skip_special)
    is_byte_level = model.tokenizer.decoder.__class__.__name__ == "ByteLevel"
    if is_byte_level or "\ufffd" not in data.decode("utf-8", "replace"):
        return str(model.tokenizer.decode(token_ids, skip_special_tokens=skip_special))
    return data.decode("utf-8", "replace")


def cases(model: Model, seed: int, count: int) -> list[Case]:
    """Random ids, several languages, emoji, broken UTF-8, special tokens; stop strings from the text, and others."""
    rng = random.Random(seed)
    texts = random_texts.texts(seed, count, ["<s>", "<|im_end|>"])
    return [_case(model, rng, text[:200]) for text in texts]


def _case(model: Model, rng: random.Random, text: str) -> Case:
    match rng.randrange(5):
        case 0:
            ids = [rng.randrange(len(model.table.all_bytes)) for _ in range(rng.randrange(1, 40))]
        case 1:
            ids = model.tokenizer.encode("".join(rng.choices(EMOJI, k=20)), add_special_tokens=False).ids
        case 2:
            ids = rng.choices(model.fragment_ids, k=rng.randrange(1, 40))
        case _:
            ids = model.tokenizer.encode(text, add_special_tokens=False).ids
    ids = list(ids)
    for _ in range(rng.choice((0, 0, 1, 3))):
        place = rng.randrange(len(ids) + 1)
        extra = rng.choice((model.special_ids, model.fragment_ids))
        ids[place : place + rng.randrange(2)] = [rng.choice(extra)]
    ids = ids or [rng.choice(model.special_ids)]
    skip_special = rng.random() < 0.7
    whole = text_of_all(model, ids, skip_special=skip_special) or "x"
    stops = []
    for _ in range(rng.randrange(4)):
        place = rng.randrange(len(whole))
        part = whole[place : place + rng.randrange(1, 9)]
        stops.append(rng.choice((part, part + "x", part[:-1] + "\u0301", "\ufffd", "\n", "😀", "never to be found")))
    return Case(ids, tuple(dict.fromkeys(stops)), rng.random() < 0.3, skip_special)


def respond(model: Model, case: Case, sizes: list[int], *, stream: bool) -> tuple[list[str], list[int], FinishReason]:
    """The text after each step, how many tokens had come then, and how it ended. Of a plain answer: the one text."""
    options = {"stop": case.stops, "include_stop": case.include_stop, "skip_special_tokens": case.skip_special}
    bare = (0,)  # the prompt leaves the beginning of the text to the output: nothing stands before it
    responder = Responder(model.table, context(route=Route.COMPLETIONS, stream=stream, bare_prompts=bare, **options))
    shown, texts, counts, place = "", [], [], 0
    while True:
        size = sizes.pop() if sizes else 1
        part, place = case.token_ids[place : place + size], place + size
        is_last = place >= len(case.token_ids)
        fed = responder.feed(0, part, FinishReason.LENGTH if is_last else FinishReason.RUNNING)
        if stream:
            shown += text_of(chunks(fed.data.replace(b"data: [DONE]\n\n", b"")))
        elif fed.data:
            shown = json.loads(fed.data)["choices"][0]["text"]
        texts.append(shown)
        counts.append(min(place, len(case.token_ids)))
        if fed.last:
            return texts, counts, fed.finish_reason


def check(model: Model, case: Case, rng: random.Random) -> None:
    whole = text_of_all(model, case.token_ids, skip_special=case.skip_special)
    expected, is_cut = reference(whole, case.stops, include_stop=case.include_stop)
    sizes = [rng.choice((1, 1, 2, 5, 30)) for _ in case.token_ids]
    (*_, plain), _, finish = respond(model, case, list(sizes), stream=False)
    assert (plain, finish == FinishReason.STOP) == (expected, is_cut)
    rng.shuffle(sizes)
    texts, counts, finish = respond(model, case, sizes, stream=True)
    assert (texts[-1], finish == FinishReason.STOP) == (expected, is_cut)
    for text, count in zip(texts[:-1], counts[:-1], strict=True):
        assert expected.startswith(text), "nothing is shown that is taken back: no part of a stop, no U+FFFD"
        data = data_of(model, case.token_ids[:count], skip_special=case.skip_special)
        known, num_used = utf_8_decode(data, "replace", False)
        assert len(data) - num_used <= 3
        assert known == text + longest_live_suffix(known, case.stops), "no more is held back than may be part of a stop"


def run(model: Model, seed: int, count: int) -> None:
    rng = random.Random(seed)
    for case in cases(model, seed, count):
        try:
            check(model, case, rng)
        except AssertionError as error:
            raise AssertionError(case) from error


def test_streams_add_up_to_the_decoded_text_cut_at_the_stop(model: Model) -> None:
    run(model, seed=1, count=200)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_streams_add_up(model: Model) -> None:
    run(model, seed=2, count=10_000)
