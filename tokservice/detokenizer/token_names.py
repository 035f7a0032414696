"""What clients read about single tokens: their text, their bytes, their log-probabilities. Detokenizer worker; pure."""

from __future__ import annotations

from collections.abc import Sequence

from tokservice.detokenizer.logprob_rows import Row
from tokservice.detokenizer.vocabulary import Vocabulary
from tokservice.protocol.logprobs import floored
from tokservice.protocol.token_entry import Alternative, TokenEntry


class TokenNames:
    """Names of the tokens of one response."""

    def __init__(self, vocabulary: Vocabulary, table: Sequence[bytes], *, as_ids: bool) -> None:
        """``table``: id -> bytes, as the response's text is made."""
        self._all_bytes = vocabulary.all_bytes
        self._table = table
        self._as_ids = as_ids

    def text(self, token_id: int) -> str:
        """The token's text; of bytes that are no text, and of ids without any, a notation that is unique."""
        data = _bytes_of(self._all_bytes, token_id)
        if self._as_ids or not data:
            return f"token_id:{token_id}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def entry(self, token_id: int, data: bytes, offset: int, row: Row | None, num_top: int) -> TokenEntry:
        """What is said about a token. ``row``: its own logprob first; None where there is none."""
        text = self.text(token_id)
        if row is None:
            return TokenEntry(token_id, text, data, offset)
        ids, values = row
        top = [
            Alternative(other, self.text(other), _bytes_of(self._table, other), floored(value))
            for other, value in zip(ids[1 : 1 + num_top], values[1 : 1 + num_top], strict=True)
        ]
        return TokenEntry(token_id, text, data, offset, floored(values[0]), top)


def _bytes_of(table: Sequence[bytes], token_id: int) -> bytes:
    return table[token_id] if token_id < len(table) else b""
