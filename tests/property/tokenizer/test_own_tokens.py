"""Chats whose content cannot bring in control tokens, on real tokenizers, templates and both back ends."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.helpers import random_texts, real_tokenizers
from tokservice.runtime.config import TokenizerConfig
from tokservice.tokenizer import chat_template
from tokservice.tokenizer.prepare import Prepared, Preparer
from tokservice.wire.messages import EngineLimits, Route

NAMES = [
    name if name in ("smollm2", "qwen3", "llama2") else pytest.param(name, marks=pytest.mark.slow)
    for name in real_tokenizers.NAMES
]
LIMITS = EngineLimits(max_model_len=10**6, vocab_size=10**6, kv_cache_tokens=10**6, eos_token_ids=(1,))
OPEN, CLOSE = "\ue123", "\ue124"


class Chats:
    """Chats of one tokenizer, and the ids they should have by the reference library alone."""

    def __init__(self, folder: Path, name: str, backend: str) -> None:
        source = real_tokenizers.TEMPLATES.get(name, "")
        if source:
            (folder / "template.jinja").write_text(source)
        file = str(folder / "template.jinja") if source else ""
        model_dir = real_tokenizers.model_dir(name)
        settings = TokenizerConfig(allow_special_in_content=False, backend=backend)
        self._preparer = Preparer(model_dir=model_dir, model_name="m", chat_template_file=file, settings=settings)
        self._preparer.set_limits(LIMITS)
        templates = chat_template.load(model_dir, file)
        assert templates is not None
        self._template = templates.default
        self._reference = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        own = self._preparer._encoder.own_tokens
        assert own is not None
        self.control_ids = frozenset(own._controls)
        self.controls = sorted(own._controls.values())
        self._own = {own._controls.get(key, "<unk>"): key for key in own._token_ids.values()}
        self._reference.add_special_tokens([*self._own])  # so that those not declared special can be text too

    def ids(self, contents: list[str]) -> list[int]:
        body = json.dumps({"messages": _messages(contents)}).encode()
        result = self._preparer.prepare(Route.CHAT_COMPLETIONS, [body], 0)
        assert isinstance(result, Prepared)
        return [token_id for (token_id,) in struct.iter_unpack("<I", result.prompts[0])]

    def usual(self, contents: list[str]) -> list[int]:
        """The whole text encoded at once, with every control token in it."""
        self._reference.encode_special_tokens = False
        return self._reference.encode(self._text(contents), add_special_tokens=False).ids

    def exact(self, contents: list[str]) -> list[int]:
        """The template's text, cut at its own control tokens; what is between them encoded on its own, as text."""
        self._reference.encode_special_tokens = True
        frame = self._text([f"{OPEN}{i}{CLOSE}" for i in range(len(contents))])
        own = "|".join(map(re.escape, sorted(self._own, key=len, reverse=True)))
        ids = []
        for piece in re.split(f"({own})", frame):
            if piece in self._own:
                ids.append(self._own[piece])
            elif piece:
                text = re.sub(f"{OPEN}(\\d+){CLOSE}", lambda name: contents[int(name[1])], piece)
                ids += self._reference.encode(text, add_special_tokens=False).ids
        return ids

    def _text(self, contents: list[str]) -> str:
        return self._template.render(_messages(contents), now=0, add_generation_prompt=True)


def _messages(contents: list[str]) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


@pytest.fixture(scope="module", params=["hf", "fastokens"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module", params=NAMES)
def chats(request: pytest.FixtureRequest, backend: str, tmp_path_factory: pytest.TempPathFactory) -> Chats:
    return Chats(tmp_path_factory.mktemp("model"), request.param, backend)


def contents(chats: Chats, seed: int, typed: list[str]) -> Iterator[list[str]]:
    """Conversations. Each content begins and ends with a letter, since some templates strip blanks."""
    texts = iter(random_texts.texts(seed, 450, typed))
    for first, second, third in zip(texts, texts, texts, strict=True):
        yield [f"a{first}b", f"c{second}d", f"e{third}f"]


def test_without_control_tokens_in_content_nothing_changes(chats: Chats) -> None:
    for conversation in contents(chats, 3, []):
        if not any(token in content for token in chats.controls for content in conversation):
            assert chats.ids(conversation) == chats.usual(conversation), ascii(conversation)


def test_typed_control_tokens_are_exactly_text(chats: Chats) -> None:
    for conversation in contents(chats, 4, chats.controls):
        conversation = [content.replace("</think>", "") for content in conversation]  # qwen3's template looks for it
        assert chats.ids(conversation) == chats.exact(conversation), ascii(conversation)


@settings(suppress_health_check=[HealthCheck.differing_executors])
@given(data=st.data())
def test_no_content_changes_the_number_of_control_tokens(chats: Chats, data: st.DataObject) -> None:
    pieces = st.one_of(st.sampled_from(chats.controls), st.text("<|im_>/s[]｜", max_size=4), st.text(max_size=4))
    content = "".join(data.draw(st.lists(pieces, max_size=6)))
    ids = chats.ids([content])
    frame = chats.ids(["x"])
    assert [i for i in ids if i in chats.control_ids] == [i for i in frame if i in chats.control_ids]
