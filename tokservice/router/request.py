"""What the router knows of one unfinished request, and the journal from which it can begin again."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from tokservice.wire.codec import TOKEN_BYTES
from tokservice.wire.messages import Buffer, FinishReason, Generate


class State(IntEnum):
    """Where a request is."""

    UPLOADING = 1  # its body is still arriving
    QUEUED = 2  # it waits for a tokenizer worker
    PREPARING = 3  # at a tokenizer worker
    RUNNING = 4  # at an engine and a detokenizer
    PARKED = 5  # accepted, but there is no engine or no detokenizer that may run it now


@dataclass(slots=True)
class Journal:
    """Everything that a fresh engine and detokenizer need to go on.

    ``prepared`` comes from the tokenizer worker, the rest from the detokenizer; the two take different ways,
    so that either may be first.
    """

    prepared: tuple[Buffer, ...] = ()  # sampling, context, the ids of each prompt; () until accepted
    outputs: list[bytearray] = field(default_factory=list)  # per choice: consumed ids, little-endian uint32
    finished: list[int] = field(default_factory=list)  # per choice: FinishReason
    notes: list[bytearray] = field(default_factory=list)  # per choice: what else the detokenizer wants kept

    def grow(self, num_choices: int) -> None:
        """Have a place for so many choices."""
        for _ in range(num_choices - len(self.outputs)):
            self.outputs.append(bytearray())
            self.finished.append(FinishReason.RUNNING)
            self.notes.append(bytearray())

    def record(self, choice: int, ids: Buffer, finish_reason: int, note: Buffer = b"") -> None:
        """Note what a detokenizer consumed for a choice."""
        if choice >= len(self.outputs):
            self.grow(choice + 1)
        self.outputs[choice] += ids
        self.notes[choice] += note
        if finish_reason != FinishReason.RUNNING:
            self.finished[choice] = finish_reason

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended; False too as long as their number is not known."""
        return bool(self.prepared) and FinishReason.RUNNING not in self.finished

    def generate(self, request_id: str, attempt: int, detokenizer: str) -> Generate:
        """The message that begins, or continues, the request."""
        resumed = any(self.outputs) or any(self.finished)
        has_notes = any(self.notes)
        kept = (*self.outputs, *(self.notes if has_notes else ()))
        return Generate(
            request_id=request_id,
            attempt=attempt,
            detokenizer=detokenizer,
            num_prompts=len(self.prepared) - 2,
            num_delivered=tuple(len(ids) // TOKEN_BYTES for ids in self.outputs) if resumed else (),
            finished=tuple(self.finished) if resumed else (),
            has_notes=has_notes and resumed,
            frames=(*self.prepared, *map(bytes, kept)) if resumed else self.prepared,
        )


@dataclass(slots=True)
class Request:
    """One unfinished request. A cancelled one stays as a tombstone until its last worker has reported."""

    request_id: str
    api: str  # identity of the API process that holds the client
    route: int
    created_s: float
    session: str = ""  # see Submit
    state: State = State.UPLOADING
    attempt: int = 0
    body: list[Buffer] = field(default_factory=list)  # until accepted
    body_bytes: int = 0
    held_bytes: int = 0  # what it counts for in admission
    num_body_deaths: int = 0  # tokenizer workers that died while encoding it
    tokenizer: str = ""
    engine: str = ""
    detokenizer: str = ""
    journal: Journal = field(default_factory=Journal)
    # Since the last new token:
    num_engine_deaths: int = 0  # while it was there
    num_detokenizer_deaths: int = 0  # while that worked on it
    num_losses: int = 0  # attempts that did not get to living workers
    parked_s: float = 0.0  # since when it is parked
    cancelled: bool = False
    opened: bool = False  # the client has its status and headers
    has_output: bool = False  # of this attempt
    undelivered: bool = False  # of this attempt: it never got to its engine or detokenizer
    first_token_s: float | None = None  # when its first token was here
