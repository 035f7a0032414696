"""Random texts that find out tokenizers: mixed scripts, odd blanks, lone marks, long words, typed control tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

_WORDS = """
the of and to in is it that was for on are with his they at be this have from or had by word but not what all
don't I'm we'll THEY'VE it'S l'été naïve café São Zürich Ångström ﬁn ﬃ ǅ ǆ ß ẞ İstanbul ıi
日本語 テキスト 你好 世界 한국어 조선글 привет мир Ελληνικά עברית العربية हिन्दी क्षि ไทย ภาษาไทย தமிழ் မြန်မာ ខ្មែរ
def class return import self.x x+=1 a[i][j] {'k':1} <b> </b> // /* */ #include -> => != === && || $x @y %d \\n
https://example.org/a?b=c&d=%20 user@example.com 2026-11-30T12:00:00Z 3.14159 1e-10 0xDEADBEEF 1,234,567.89
😀 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 👍🏽 ❤️ ✈ ☺️ 1️⃣ 🧑🏿‍🚀
"""
WORDS = _WORDS.split()
BLANKS = (
    " \t\n\r\v\f\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2000\u2003\u2007\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
    "\ufeff\u200b\u180e"
)
MARKS = (
    "\u0300\u0301\u0308\u0323\u0327\u0338\u0345\u034f\u0591\u05b0\u064b\u0670\u0711\u093c\u09be\u0b3e\u0e31\u0e38"
    "\u0f71\u0f72\u1dce\u200c\u200d\u20d0\u20dd\u20e3\u302a\u3099\u309a\ufe0e\ufe0f\U0001d165\U0001e944\U00011099"
)
BASES = "aAeEoOuUcCnNyY<>=1９कঅെതເกカがㄱ가각각"
ODD = (
    "\x00\x01\x1a\x7f\x80\xad\u061c\u200e\u202e\u2060\ud7ff\ue000\uf8ff\ufdd0\ufffd\ufffe\uffff\U00010000"
    "\U000e0001\U0010ffff"
)
DIGITS = "0123456789٣४９𝟘²½Ⅷ①"


def texts(seed: int, count: int, tokens: Sequence[str]) -> Iterator[str]:
    """``count`` texts, the same for the same seed. ``tokens``: control tokens, as users may type them."""
    rng = random.Random(seed)
    for _ in range(count):
        if rng.random() < 0.05:
            yield _long_word(rng)
        else:
            yield "".join(_piece(rng, tokens) for _ in range(rng.choice((1, 2, 4, 8, 16, 40))))


def _piece(rng: random.Random, tokens: Sequence[str]) -> str:
    match rng.randrange(14):
        case 0 | 1 | 2:
            return rng.choice(("", " ", " ")) + rng.choice(WORDS)
        case 3:
            return " ".join(rng.choices(WORDS, k=rng.randrange(2, 8)))
        case 4:
            return rng.choice(" \n\t\r") * rng.randrange(1, 12)
        case 5:
            return "".join(rng.choices(BLANKS, k=rng.randrange(1, 5)))
        case 6:
            base: str = rng.choice(["", *BASES])
            return base + "".join(rng.choices(MARKS, k=rng.randrange(1, 6)))
        case 7:
            return "".join(rng.choices(BASES + MARKS, k=rng.randrange(1, 10)))
        case 8:
            return "".join(rng.choices(DIGITS, k=rng.randrange(1, 12)))
        case 9:
            return rng.choice(ODD)
        case 10:
            return "".join(_any_character(rng) for _ in range(rng.randrange(1, 8)))
        case 11:
            return _around(rng, rng.choice(tokens)) if tokens else rng.choice(WORDS)
        case 12:
            return "".join(rng.choices("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~¡§«·¿…—“”€™", k=rng.randrange(1, 10)))
        case _:
            return "".join(rng.choices("abcdefghijklmnopqrstuvwxyzABCXYZ'", k=rng.randrange(1, 20)))


def _around(rng: random.Random, token: str) -> str:
    """A control token as it is, between blanks, cut short, doubled, or in other letters."""
    cut = rng.randrange(len(token) + 1)
    forms = (
        token,
        token,
        f" {token} ",
        f"\n\n{token}\n",
        token[:cut],
        token[cut:],
        token * 2,
        token.upper(),
        f"x{token}́",
    )
    return rng.choice(forms)


def _any_character(rng: random.Random) -> str:
    top = rng.choice((0x250, 0x3000, 0x10000, 0x20000, 0x110000))
    while True:
        code = rng.randrange(top)
        if not 0xD800 <= code < 0xE000:
            return chr(code)


def _long_word(rng: random.Random) -> str:
    unit = rng.choice(
        ("a", "ab", "0", "9876543210", "日", "é", "=", " ", "\n", "e\u0301", "😀", "\u0301", "ก็", "aB", "x1")
    )
    if rng.random() < 0.5:
        return unit * rng.randrange(50, 3000)
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz0123456789+/", k=rng.randrange(200, 4000)))
