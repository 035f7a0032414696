"""How many characters a prompt may have at most, so that hopeless ones are refused unencoded. Tokenizer worker; pure.

A prompt with more characters than ``limit * longest token`` cannot fit into ``limit`` tokens, provided that no step
of the tokenizer shrinks text without bound. Decided once, from tokenizer.json.
"""

from __future__ import annotations

from typing import Any

# Canonical composition joins at most four characters into one (Unicode, chapter 3.11: the longest full canonical
# decomposition of a character has four code points); decomposition and lower-casing never shrink a text.
_MAX_SHRINKAGE = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
_KEEPING_PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Digits", "Punctuation", "Split"}


def max_chars_per_token(tokenizer: dict[str, Any]) -> int | None:
    """Most characters of a text that one token can stand for, from a parsed tokenizer.json; None: no bound is known."""
    model = tokenizer["model"]
    pre_tokenizers = _flatten(tokenizer.get("pre_tokenizer"), "pretokenizers")
    normalizers = _flatten(tokenizer.get("normalizer"), "normalizers")
    byte_level = any(step["type"] == "ByteLevel" for step in pre_tokenizers + normalizers)
    if not (byte_level or model.get("byte_fallback")):
        return None  # an unknown stretch of text may become one token, or none
    for step in pre_tokenizers:
        if step["type"] not in _KEEPING_PRE_TOKENIZERS or step.get("behavior") == "Removed":
            return None
    shrinkage = 1
    for step in normalizers:
        factor = _shrinkage(step)
        if factor is None:
            return None
        shrinkage *= factor
    added = tokenizer.get("added_tokens") or []
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None  # such a token swallows any number of blanks beside it
    vocab = model["vocab"]
    tokens = vocab if isinstance(vocab, dict) else [entry[0] for entry in vocab]
    longest = max(max(map(len, tokens), default=1), max((len(token["content"]) for token in added), default=1))
    return longest * shrinkage


def _shrinkage(normalizer: dict[str, Any]) -> int | None:
    match normalizer:
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
            return 1 if len(content) >= len(pattern) else None
        case {"type": str(kind)}:
            return _MAX_SHRINKAGE.get(kind)
    return None


def _flatten(step: dict[str, Any] | None, children: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [inner for part in step[children] for inner in _flatten(part, children)]
    return [step]
