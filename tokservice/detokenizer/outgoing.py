"""What a detokenizer worker tells the router: one message for each API process, and what is large apart. Pure."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokservice.detokenizer.respond import Fed
from tokservice.wire.codec import MAX_CHUNK_BYTES
from tokservice.wire.messages import Buffer, Progress


@dataclass(slots=True)
class _Rows:
    """The columns of one Progress."""

    request_ids: list[str] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    finish_reasons: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    ids: array[int] = field(default_factory=lambda: array("I"))
    data: list[Buffer] = field(default_factory=list)
    notes: list[bytes] = field(default_factory=list)

    def add(self, request_id: str, attempt: int, fed: Fed, flags: int, ids: Sequence[int]) -> None:
        self.request_ids.append(request_id)
        self.attempts.append(attempt)
        self.choices.append(fed.choice)
        self.num_tokens.append(fed.num_consumed)
        self.finish_reasons.append(fed.finish_reason)
        self.statuses.append(fed.status)
        self.flags.append(flags)
        self.ids.extend(ids)
        self.data.append(fed.data)
        self.notes.append(fed.note)

    def message(self) -> Progress:
        notes = b"".join(self.notes)
        ready = self.data[0] if len(self.data) == 1 else b"".join(self.data)
        return Progress(
            request_ids=tuple(self.request_ids),
            attempts=tuple(self.attempts),
            choices=tuple(self.choices),
            num_tokens=tuple(self.num_tokens),
            finish_reasons=tuple(self.finish_reasons),
            statuses=tuple(self.statuses),
            flags=tuple(self.flags),
            num_bytes=tuple(map(len, self.data)),
            num_note_bytes=tuple(map(len, self.notes)) if notes else (),
            frames=(self.ids.tobytes(), ready, *((notes,) if notes else ())),
        )


class Outgoing:
    """Messages in the making."""

    def __init__(self, send: Callable[[Progress], None]) -> None:
        self._send = send
        self._by_api: defaultdict[str, _Rows] = defaultdict(_Rows)

    def add(self, request_id: str, attempt: int, fed: Fed, flags: int, ids: Sequence[int]) -> None:
        """A row. ``flags``: ReadyFlags; ``ids``: the tokens consumed."""
        api = request_id.rpartition(":")[0]
        rows = self._by_api[api]
        rows.add(request_id, attempt, fed, flags, ids)
        if len(fed.data) > MAX_CHUNK_BYTES:  # nothing is joined to what is large
            self._send(self._by_api.pop(api).message())

    def flush(self) -> None:
        """Send all of them."""
        for rows in self._by_api.values():
            self._send(rows.message())
        self._by_api.clear()
