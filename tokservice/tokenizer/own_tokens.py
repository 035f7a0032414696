"""Keeps a chat template's own control tokens apart from those that users type. Tokenizer worker, one thread.

Used with ``tokenizer.allow_special_in_content = false``. Control tokens are the special tokens, and those other added
tokens that the template itself writes (the turn marks of some models are not declared special), unless they are blank.

Each control token that the template writes has a stand-in: a text that nobody can guess, added to the tokenizer with
the token's own flags. The template is compiled to write the stand-ins (``template_marks``), and the rendered text is
encoded with everything special taken as text. So the tokenizer itself splits the text where the template wrote a
control token and nowhere else; whatever else looks like one, however a user put it together, is text. Last, the ids
of the stand-ins become those of their tokens.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
from array import array
from collections.abc import Callable, Iterable

from tokservice.tokenizer.backends import AddedToken, Backend, TokenIds
from tokservice.wire.errors import StartupError

_SECRET_CHARS = 8
_PLANE_15, _PLANE_16 = 0xF0000, 0x100000  # for private use; no normalization touches them
_PLANE_CHARS = 0xFFFE  # the last two code points of a plane are no characters


class Rendered(str):
    """A rendered text as users know it; ``marked`` is the same with stand-ins, and goes to the encoder alone."""

    __slots__ = ("marked",)
    marked: str


class OwnTokens:
    """The control tokens of one tokenizer, and those that its template writes."""

    def __init__(self, backend: Backend, unk_id: int | None) -> None:
        """``backend`` learns the stand-ins. ``unk_id``: what unknown text becomes."""
        self._backend = backend
        self._unk_id = unk_id
        self._secret = "".join(chr(_PLANE_16 + secrets.randbelow(_PLANE_CHARS)) for _ in range(_SECRET_CHARS))
        self._token_ids: dict[int, int] = {}  # id of a stand-in -> id of its token
        self._controls: dict[int, str] = {}
        self._num_added = 0  # control tokens that the tokenizer itself puts around any text
        self._unmark: Callable[[str], str] = str
        self._taught: list[AddedToken] = []

    def mark(self, template_texts: Iterable[str]) -> Callable[[str], str]:
        """From the texts that a template may write, the function that puts stand-ins into such a text.

        Once, at start-up.
        """
        written = "\0".join(template_texts)
        added = self._backend.added_tokens()
        own = {key: token for key, token in added.items() if token.content in written and not token.content.isspace()}
        new_special = [dataclasses.replace(token, special=True) for token in own.values() if not token.special]
        stand_ins = {token.content: self._secret + chr(_PLANE_15 + i) for i, token in enumerate(own.values())}
        tokens = [dataclasses.replace(token, content=stand_ins[token.content], special=False) for token in own.values()]
        self._backend.add_tokens(new_special)
        self._token_ids = dict(zip(self._backend.add_tokens(tokens), own, strict=True))
        self._taught = new_special + tokens
        self._controls = {key: token.content for key, token in added.items() if token.special or key in own}
        self._controls.pop(-1 if self._unk_id is None else self._unk_id, None)
        self._num_added = self._num_controls(self._backend.encode("", add_special_tokens=True))
        self._unmark = _replacing({stand_in: token for token, stand_in in stand_ins.items()})
        return _replacing(stand_ins)

    def teach(self, backend: Backend) -> None:
        """Have another back end of the same tokenizer do as the first does."""
        backend.add_tokens(self._taught)

    def check(self, marked: Iterable[str], expected: Iterable[str]) -> None:
        """Raise StartupError unless typed control tokens are text, and other conversations keep their ids.

        ``marked``, ``expected``: what the template writes for some conversations, with and without ``mark``.
        """
        texts = [(self.rendered(text), plain) for text, plain in zip(marked, expected, strict=True)]
        try:
            for content in self._controls.values():
                self.encode(content, add_special_tokens=False)
            is_kept = all(
                text == plain
                and self.encode(text.marked, add_special_tokens=False)
                == self._backend.encode(plain, add_special_tokens=False)
                for text, plain in texts
            )
        except ValueError as error:
            raise StartupError(f"tokenizer.allow_special_in_content = false: {error}") from error
        if not is_kept:
            raise StartupError(
                "tokenizer.allow_special_in_content = false: this chat template puts control tokens together"
                " in a way that cannot be told from what users type"
            )

    def rendered(self, marked: str) -> Rendered:
        """What the template wrote."""
        text = Rendered(self._unmark(marked))
        text.marked = marked
        return text

    def encode(self, marked: str, *, add_special_tokens: bool) -> TokenIds:
        """Token ids of a marked text. Raises ValueError where a control token came from anything but a stand-in.

        (A tokenizer may have its control tokens among the pieces that it builds text from; no setting prevents that.)
        """
        ids = self._backend.encode(marked, add_special_tokens=add_special_tokens, special_as_text=True)
        return self.restored(ids, add_special_tokens=add_special_tokens)

    def restored(self, token_ids: TokenIds, *, add_special_tokens: bool) -> TokenIds:
        """The second half of ``encode``."""
        if self._num_controls(token_ids) > (self._num_added if add_special_tokens else 0):
            raise ValueError("this tokenizer takes a typed control token for the token in any case")
        own = self._token_ids
        return array("I", [own.get(token_id, token_id) for token_id in token_ids])

    def _num_controls(self, token_ids: TokenIds) -> int:
        return sum(map(self._controls.__contains__, token_ids))


def _replacing(replacements: dict[str, str]) -> Callable[[str], str]:
    """The function that replaces in a text, from the left, the longest first."""
    longest_first = sorted(replacements, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
    return lambda text: pattern.sub(lambda found: replacements[found[0]], text)
