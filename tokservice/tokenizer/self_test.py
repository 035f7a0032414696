"""Does a fast back end give the ids of the reference? Some 220 fixed texts, tried at start-up. Tokenizer worker; pure.

The texts are of the kinds in which tokenizers differ: scripts, code, runs of blanks, combining marks, digits, emoji
sequences, very long words, control characters, and the tokenizer's own special tokens as users may type them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from tokservice.tokenizer.backends import Backend

VERSION = 1  # raise it with any change to the texts or the comparison: remembered verdicts count for one version

_MAX_TYPED = 24  # added tokens that are tried, evenly chosen

_PROSE = (
    "The quick brown fox doesn't jump; it's 3 o'clock, and they'll've LEFT, we're told. I'M SURE THEY'D SAY \"NO\"!",
    "Grüße aus Köln, naïve café à la carte, coração, İstanbul'da ılık, Łódź, ﬁnance ﬃ ǅungla ß ẞ Ångström.",
    "Привет, мир! Съешь же ещё этих мягких французских булок. Ελληνικά: Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "吾輩は猫である。名前はまだ無い。カタカナ、ひらがな、漢字、ﾊﾝｶｸ、１２３。你好，世界！中文分词没有空格。繁體字與异体字。",
    "안녕하세요 세계. 각 글자는 조합됩니다. 각가힣 ᄒᆞᆫ글",
    "שלום עולם, בְּרֵאשִׁית בָּרָא אֱלֹהִים. مرحبا بالعالم، السَّلامُ عَلَيْكُم ٠١٢٣٤٥٦٧٨٩ ﷺ ﻻ",
    "नमस्ते दुनिया, क्षत्रिय ज्ञान श्री १२३। தமிழ் மொழி கௌ வாழ்க. বাংলা ভাষা। ગુજરાતી ਪੰਜਾਬੀ తెలుగు ಕನ್ನಡ മലയാളം සිංහල",
    "สวัสดีชาวโลก ภาษาไทยไม่มีช่องว่าง น้ำ ก็ กำลัง. ຂ້ອຍ. မြန်မာဘာသာ ကြောင်. ភាសាខ្មែរ. བོད་སྐད་ རྒྱལ་པོ།",
    "ქართული Հայերեն አማርኛ ᏣᎳᎩ ᠮᠣᠩᠭᠣᠯ ߒߞߏ ⵜⴰⵎⴰⵣⵉⵖⵜ 𐌰𐌱𐌲 𞤀𞤁𞤂 𓀀𓁐 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟘𝟙𝟚 Ⅷ ½ ² ①",
    "Tiếng Việt: Những câu chuyện cổ tích, đường phố Hà Nội. Yorùbá: ọjọ́ ọ̀sẹ̀. Polski: zażółć gęślą jaźń.",
)
_CODE = (
    'def f(x: int) -> list[int]:\n    """Doc."""\n\treturn [x**2 for _ in range(10) if x != 0]  # comment\n\n\n',
    'class A(B):\n    pass\n\n\n@property\ndef g(self, *args, **kw): self._x += f"{a!r:>10}"; raise ValueError\n',
    '#include <stdio.h>\r\nint main(void) {\r\n\tprintf("%d\\n", a->b[0] << 2 | 0xFF);\r\n\treturn 0;\r\n}\r\n',
    "const f = async (a) => { await g(`${a?.b ?? 1}`); }; // TODO\n/* x */ if (a === b && !c || d) {}\n",
    "<!DOCTYPE html>\n<div class=\"a b\"><p>Text&nbsp;&amp; more</p><br/></div>\n<script>var x='</p>';</script>",
    "SELECT * FROM t WHERE a >= 1 AND b LIKE '%x%' ORDER BY c DESC;\n",
    '{"k": [1, 2.5e-3, null, true], "é": "\\u00e9", "nested": {"a": {"b": []}}}\n',
    'fn main() { let v: Vec<&\'static str> = vec!["a"; 3]; println!("{v:?}"); }\n',
    "$ ls -la | grep '^d' > /dev/null 2>&1 && echo \"$HOME\"\n",
    "\\begin{equation} \\sum_{i=0}^{n} x_i^2 \\le \\frac{1}{2} \\end{equation} $$a_{1}$$ ∑∫√∞≠≤≥±×÷∂∇∈∀∃ →⇒",
    "| a | b |\n|---|:-:|\n| 1 | **2** |\n\n# Title\n\n* item\n  1. nested\n\n```py\nx = 1\n```",
    "\n---\n~~~~~~ ====== ****** ______ ...... !!!!!! ?!?! -- --- «» “” ‘’ „“ … – — • · § ¶ © ® ™ ° € £ ¥",
    "https://example.org/a/b.html?c=d&e=%20f#g user.name+tag@example.co.uk C:\\Users\\x\\ ../..//a 10.0.0.1:8080 ::1",
    "camelCase PascalCase snake_case SCREAMING_CASE kebab-case HTTPServer2XML iPhone15Pro a1b2c3 __init__ @property",
)
_DIGITS = (
    "1",
    "12",
    "123",
    "1234",
    "12345678901234567890",
    "3.14159 1,234,567.89 -1e-10 0x1F 1/2 50% $5 €6 10:30",
    "٣٤٥९८७１２３²³½",
)
_EMOJI = (
    "😀",
    "👩‍👩‍👧‍👦",
    "🏳️‍🌈🏴‍☠️",
    "🇩🇪🇫🇷🇯",
    "👍🏽👍🏿",
    "❤️❤",
    "1️⃣#️⃣",
    "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
    "☺︎☺️ ✈ a😀b 😀😀😀 😀 ",
)
_MARKS = (
    "\u0300\u0301\u0308\u0323\u0327\u0338\u0345\u0483\u05b0\u064b\u0653\u0670\u093c\u0b3e\u0e31\u0e38\u0f71\u0f72"
    "\u1161\u11a8\u1dce\u200d\u20d0\u20dd\u3099\ufe0f\U0001d165\U000110ba"
)
_BASES = ("", "a", "E", "n", " ", "<", "=", "1", "가", "か", "ὲ", "\n")
_BLANKS = " \t\n\r\v\f\x1c\x1f\x85\xa0\u1680\u2003\u2009\u2028\u2029\u202f\u3000\u200b\ufeff\u180e"
_ODD = "\x00\x01\x1b\x7f\x80\xad\u200e\u202e\u2060\ud7ff\ue000\ufdd0\ufffd\ufffe\uffff\U00010000\U000e0001\U0010ffff"
_LONG = ("a", "ab", "Ab1", "0", "é", "日", "ก็", "😀", "e\u0301", "\u0301", "=", "!?", " ", "\n", " \n", "\t ", "\x00")


def first_difference(candidate: Backend, reference: Backend) -> str:
    """Where two back ends of one tokenizer differ; empty: nowhere."""
    added = reference.added_tokens()
    if candidate.added_tokens() != added:
        return "they know different added tokens"
    for number, text in enumerate(texts([token.content for token in added.values()])):
        for other in (True, False):  # with either kind of special token as the file says, or the other way about
            ids, expected = (
                backend.encode(text, add_special_tokens=other, special_as_text=other)
                for backend in (candidate, reference)
            )
            if ids != expected:
                return f"other token ids for text {number} of the self-test"
        if candidate.decode(expected) != reference.decode(expected):
            return f"another text from the token ids of text {number} of the self-test"
        if any(candidate.token(token_id) != reference.token(token_id) for token_id in set(expected)):
            return f"other tokens in text {number} of the self-test"
    return ""


def texts(added_tokens: Iterable[str]) -> list[str]:
    """The texts, for a tokenizer with these added tokens."""
    added = sorted(added_tokens)
    chosen = added[:: max(1, len(added) // _MAX_TYPED)]
    return [*_PROSE, *_CODE, *_DIGITS, *_EMOJI, *_built(), *_typed(chosen), *_shuffled(chosen), long_text()]


def long_text() -> str:
    """Some 40,000 characters of everything: what a first long prompt may need, for warming up as well."""
    rng = random.Random(VERSION)
    words = " ".join((*_PROSE, *_CODE)).split(" ")
    return " ".join(rng.choices(words, k=5_000)) + "".join(_CODE) * 4


def _built() -> Iterator[str]:
    yield ""
    for base in _BASES:
        yield "".join(base + mark for mark in _MARKS)
        yield f"x{base}{_MARKS}y {_MARKS[::-1]}{base}"
    for blank in _BLANKS:
        yield f"a{blank}b{blank * 2}c{blank * 3} d {blank}e{blank * 17}f\n{blank}\n{blank * 2}"
    yield from (f"{odd}a{odd}{odd} {odd} b{odd}" for odd in _ODD)
    for unit in _LONG:
        yield unit * (1500 // len(unit))
        yield f"a {unit * 100} b"


def _typed(added: Iterable[str]) -> Iterator[str]:
    for token in added:
        half = len(token) // 2
        broken = f"{token[:half]} {token[half:]} {token.upper()} {token[:-1]}"
        yield f"{token} a{token}b {token}{token}\n{token}\u0301 {broken}"


def _shuffled(added: list[str]) -> Iterator[str]:
    """All of it in disorder, so that each kind meets each other."""
    rng = random.Random(VERSION)
    kinds = (_MARKS, _BLANKS, _ODD, _BASES, _EMOJI, _DIGITS, added or _BASES)
    words = " ".join((*_PROSE, *_CODE)).split()
    for _ in range(60):
        parts = [rng.choice(rng.choice(kinds)) if rng.random() < 0.5 else rng.choice(words) + " " for _ in range(60)]
        yield "".join(parts)
