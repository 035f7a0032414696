"""Folders of tiny models' tokenizers, built with the `tokenizers` library, one for each family of decoders."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = (
    "The capital of France is Paris. hello world, in the house; def f(x):\n    return x + 1\n",
    "Grüße aus Köln, naïve café, 日本語のテキスト, 你好世界, привет мир, 😀🎉 emoji and more text.",
    "one two three four five six seven eight nine ten <b>bold</b> \t tabs  and   blanks\n\n",
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@cache
def byte_level() -> Tokenizer:
    """Byte-level BPE as of GPT-2, Qwen or SmolLM2; ids 0 to 2 are special, "<think>" is added and ordinary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("two words", special=False)])
    return tokenizer


@cache
def byte_level_with_nfc() -> Tokenizer:
    """``byte_level`` of composed text, as of Qwen."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


@cache
def byte_level_with_digits() -> Tokenizer:
    """``byte_level`` with each digit on its own, as of SmolLM2."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """SentencePiece-like BPE as of Llama 2: "▁" for blanks, byte tokens, a synthetic leading blank, a BOS."""
    vocab: dict[str, int] = {}
    for token in ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"):
        vocab[token] = len(vocab)
    merges: list[tuple[str, str]] = []
    for word in ["▁hello", "▁world", "▁in", "▁the", "▁house", "▁France", "▁is", "▁Paris", "▁a", "日本"]:
        for character in word:
            vocab.setdefault(character, len(vocab))
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    vocab["▁in▁the"] = len(vocab)  # a token of two words
    merges.append(("▁in", "▁the"))
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    """The tokens of ``byte_fallback`` under the Metaspace decoder, which joins the words of a first token."""
    tokenizer = Tokenizer.from_str(byte_fallback().to_str())
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def parsed(tokenizer: Tokenizer) -> dict[str, Any]:
    """The contents of tokenizer.json."""
    value: dict[str, Any] = json.loads(tokenizer.to_str())
    return value


def write_model(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    chat_template: str | list[dict[str, str]] | None = CHAT_TEMPLATE,
    special_tokens: dict[str, str] | None = None,
    generation_config: dict[str, Any] | None = None,
) -> Path:
    """Write the files that the two worker packages read."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    config: dict[str, Any] = dict(special_tokens or {})
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return folder
