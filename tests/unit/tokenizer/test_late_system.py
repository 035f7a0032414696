from __future__ import annotations

import time
from itertools import pairwise

import pytest

from tokservice.protocol.requests import Message
from tokservice.tokenizer.late_system import folded


def conversation(turns: str) -> list[Message]:
    """A word for each message: its role's first letter, its text."""
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
    return [Message(role=roles[turn[0]], content=turn[1:]) for turn in turns.split()]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ("s1 u2 a3 u4", "s1 u2 a3 u4"),
        ("s1 d2 u3", "s1+2 u3"),
        ("u1 s2 s3", "u1+2+3"),
        ("u1 a2 t3 s4 a5", "u1 a2 t3+4 a5"),
        ("u1 a2 s3 s4 u5", "u1 a2 u3+4+5"),
        ("u1 a2 s3 t4", "u1 a2 t3+4"),
        ("u1 a2 s3", "u1 a2 u3"),
        ("u1 a2 s3 a4", "u1 a2 u3 a4"),
        ("s1", "s1"),
    ],
)
def test_later_system_messages_join_their_neighbours(turns: str, expected: str) -> None:
    wanted = [
        Message(role=turn.role, content=str(turn.content).replace("+", "\n\n")) for turn in conversation(expected)
    ]
    messages = conversation(turns)
    assert folded(messages) == wanted
    assert messages == conversation(turns)


def test_a_conversation_that_goes_on_begins_as_it_did() -> None:
    turns = ["s1", "u2", "s3", "a4", "t5", "s6", "a7", "u8", "s9"]
    texts = [folded(conversation(" ".join(turns[:end]))) for end in range(1, len(turns) + 1)]
    for before, after in pairwise(texts):
        assert after[: len(before) - 1] == before[:-1]
        assert str(after[len(before) - 1].content).startswith(str(before[-1].content))


def test_many_in_a_row_take_no_longer_each() -> None:
    messages = [Message(role="user", content="x"), *[Message(role="system", content="y" * 200)] * 60_000]
    start = time.process_time()
    assert len(folded(messages)) == 1
    assert time.process_time() - start < 5
