"""The table token id -> bytes, built once from tokenizer.json. Detokenizer worker; imports no tokenizer library.

Two families of decoders are covered, and with them all the usual models:

* byte-level (GPT-2, Llama 3, Qwen, DeepSeek, SmolLM): each character of a token stands for one byte;
* SentencePiece (Llama 2, Mistral, Gemma): "▁" stands for a blank, "<0x0A>" for a byte, where the decoder says so.

A tokenizer with another kind of decoder (WordPiece, CTC, none at all) is refused at start-up: the text of its
tokens depends on their neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from tokservice.wire.errors import StartupError

# Tokens between which thoughts and tool calls stand; in some vocabularies they are special.
MARKS = frozenset(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"]
)

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What each token id adds to a text. Ids past the end (padding rows of the embedding) add nothing."""

    all_bytes: Sequence[bytes]  # id -> bytes
    visible_bytes: Sequence[bytes]  # the same, but special tokens are empty
    strips_leading_space: bool  # the decoder drops one blank that the tokenizer put before the whole text
    marked_bytes: Sequence[bytes] = ()  # as visible_bytes, but special tokens that are MARKS have their text
    special_ids: Mapping[bytes, int] = field(default_factory=dict)  # by the text of special tokens

    def table(self, *, skip_special: bool, with_marks: bool = False, stops: Iterable[str] = ()) -> Sequence[bytes]:
        """Id -> bytes, with the special tokens or without; ``with_marks``: for a parser that looks for them.

        ``stops``: stop strings, which are found where they are special tokens too.
        """
        if not skip_special:
            return self.all_bytes
        table = self.marked_bytes if with_marks and self.marked_bytes else self.visible_bytes
        texts = [text for text in map(str.encode, stops) if text in self.special_ids]
        return Unhidden(table, {self.special_ids[text]: text for text in texts}) if texts else table


class Unhidden(Sequence[bytes]):
    """A table in which a few tokens have their text after all. No copy: it is made for a request."""

    def __init__(self, table: Sequence[bytes], texts: Mapping[int, bytes]) -> None:
        self._table = table
        self._texts = texts

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, token_id: Any) -> Any:
        return self._texts.get(token_id) or self._table[token_id]


def load(model_dir: Path) -> Vocabulary:
    """Read ``tokenizer.json`` of a model's folder. Raises StartupError."""
    path = model_dir / "tokenizer.json"
    try:
        return build(orjson.loads(path.read_bytes()))
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise StartupError(f"{path} is not valid JSON: {error}") from error
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise StartupError(f"{path} has an unexpected form: {error!r}") from error


def build(tokenizer: dict[str, Any]) -> Vocabulary:
    """The table of a parsed tokenizer.json. Raises StartupError for decoders that it does not cover."""
    to_bytes, strips_leading_space = _token_decoder(tokenizer.get("decoder"))
    tokens = _tokens(tokenizer["model"]["vocab"])
    added = tokenizer.get("added_tokens") or []
    tokens.update((token["id"], token["content"]) for token in added)

    all_bytes = [b""] * (max(tokens, default=-1) + 1)
    for token_id, token in tokens.items():
        all_bytes[token_id] = to_bytes(token)
    visible_bytes, marked_bytes = list(all_bytes), list(all_bytes)
    for token in added:
        if token["special"]:
            visible_bytes[token["id"]] = b""
            marked_bytes[token["id"]] = all_bytes[token["id"]] if token["content"] in MARKS else b""
    special_ids = {all_bytes[token["id"]]: token["id"] for token in added if token["special"]}
    return Vocabulary(all_bytes, visible_bytes, strips_leading_space, marked_bytes, special_ids)


def _tokens(vocab: Any) -> dict[int, str]:
    """Id -> token of the model's vocabulary: a mapping (BPE), or a list of [token, score] (Unigram)."""
    if isinstance(vocab, list):
        return {token_id: entry[0] for token_id, entry in enumerate(vocab)}
    return {token_id: token for token, token_id in vocab.items()}


# --- decoders -------------------------------------------------------------------------------------------------


def _token_decoder(decoder: dict[str, Any] | None) -> tuple[Callable[[str], bytes], bool]:
    """How one token becomes bytes, and whether a blank before the whole text is dropped."""
    steps = _flatten(decoder)
    kinds = [step["type"] for step in steps if step["type"] != "Fuse"]
    if kinds == ["ByteLevel"]:
        return _byte_level, False

    replacements: list[tuple[str, str]] = []
    byte_fallback = strips = fused = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if not fused:
                replacements.append((pattern, content))
            case {"type": "Metaspace", "replacement": str(marker)} if not fused:
                replacements.append((marker, " "))
                strips = step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True)
            case {"type": "ByteFallback"} if not fused:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0} if fused:
                strips = True
            case _:
                raise StartupError(f"tokenizer.json has a decoder that is not supported: {orjson.dumps(step).decode()}")
    if not replacements:
        raise StartupError(f"tokenizer.json has a decoder that is not supported: {orjson.dumps(decoder).decode()}")

    def to_bytes(token: str) -> bytes:
        for pattern, content in replacements:
            token = token.replace(pattern, content)
        if byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte.group(1))
        return token.encode()

    return to_bytes, bool(strips)


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _flatten(part)]
    return [decoder]


def _byte_level_alphabet() -> dict[int, str]:
    """Maps the characters of byte-level tokens to those whose Latin-1 code is the byte they stand for.

    Printable Latin-1 characters stand for their own byte, the other 68 bytes for U+0100 and up in order (GPT-2).
    A character outside the alphabet maps to one that Latin-1 cannot encode.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) for byte in printable} | dict.fromkeys(others, "\uffff")
    return alphabet | {0x100 + place: chr(byte) for place, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _byte_level(token: str) -> bytes:
    """A token with any character outside the alphabet (an added token with a blank) stands for its own UTF-8."""
    try:
        return token.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()
