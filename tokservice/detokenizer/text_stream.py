"""Token ids to text, a few at a time: the joined pieces always equal the decoding of all ids at once.

Detokenizer worker; pure. Bytes that may still become a character (at most three) are held back; bytes that
cannot become U+FFFD at once, as the Unicode standard recommends (one for each maximal invalid part). The cost
of a token depends on its own length alone.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence


class TextStream:
    """The text of one choice."""

    __slots__ = ("_at_start", "_pending", "table")

    def __init__(self, table: Sequence[bytes], *, strip_leading_space: bool) -> None:
        self.table = table  # id -> bytes, of the tokens to come
        self._pending = b""  # the beginning of a character
        self._at_start = strip_leading_space  # the synthetic blank before the text has yet to be dropped

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        table = self.table
        try:
            data = table[token_ids[0]] if len(token_ids) == 1 else b"".join([table[i] for i in token_ids])
        except IndexError:  # ids that the tokenizer does not know: padding rows of the embedding
            data = b"".join([table[i] for i in token_ids if i < len(table)])
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        if self._pending:
            data = self._pending + data
        text, num_used = utf_8_decode(data, "replace", False)
        self._pending = data[num_used:]
        return text

    def data(self, token_id: int) -> bytes:
        """The bytes that a token would add now."""
        data = self.table[token_id] if token_id < len(self.table) else b""
        return data.removeprefix(b" ") if self._at_start else data

    def flush(self) -> str:
        """The end of the text: an unfinished character becomes U+FFFD."""
        text, _ = utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        return text

    @property
    def pending(self) -> bytes:
        """The beginning of a character that is held back."""
        return self._pending
