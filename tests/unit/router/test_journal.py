from __future__ import annotations

from tokservice.router.request import Journal
from tokservice.wire import codec
from tokservice.wire.messages import FinishReason


def test_notes_travel_behind_the_outputs_of_all_choices() -> None:
    """Logprobs cannot be had again from the ids, so a plain answer would lack them after a worker's death."""
    journal = Journal(prepared=(b"sampling", b"context", b"\1\0\0\0"))
    journal.grow(2)
    journal.record(0, b"\5\0\0\0", FinishReason.RUNNING, b"note5")
    journal.record(0, b"\6\0\0\0", FinishReason.RUNNING, b"note6")
    message = journal.generate("r", 2, "d")
    assert message.has_notes
    assert message.frames[3:] == (b"\5\0\0\0\6\0\0\0", b"", b"note5note6", b"")
    assert codec.decode(codec.encode(message)) == message


def test_without_notes_there_are_no_frames_for_them() -> None:
    journal = Journal(prepared=(b"sampling", b"context", b"\1\0\0\0"))
    journal.record(0, b"\5\0\0\0", FinishReason.RUNNING)
    message = journal.generate("r", 2, "d")
    assert not message.has_notes
    assert message.frames[3:] == (b"\5\0\0\0",)
