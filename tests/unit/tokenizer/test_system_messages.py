from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest

from tokservice.tokenizer.system_messages import folded


def conversation(turns: str) -> list[dict[str, Any]]:
    """A word for each message: its role's first letter, its text."""
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[turn[0]], "content": turn[1:].replace("+", "\n\n")} for turn in turns.split()]


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
        ("s1", "u1"),
        ("s1 a2", "s1 a2"),
    ],
)
def test_later_system_messages_join_their_neighbours(turns: str, expected: str) -> None:
    messages = conversation(turns)
    assert folded(messages, keeps_first=True) == conversation(expected)
    assert messages == conversation(turns)


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ("s1 u2 a3 s4 u5", "u1+2 a3 u4+5"),
        ("s1 d2 u3 s4", "u1+2+3+4"),
        ("s1 a2 u3", "u1 a2 u3"),
        ("s1 s2", "u1+2"),
        ("s u1", "u1"),
        ("s", "u"),
        ("u1 a2", "u1 a2"),
    ],
)
def test_the_first_one_too(turns: str, expected: str) -> None:
    assert folded(conversation(turns), keeps_first=False) == conversation(expected)


def test_a_conversation_that_goes_on_begins_as_it_did() -> None:
    turns = ["s1", "u2", "s3", "a4", "t5", "s6", "a7", "u8", "s9"]
    for keeps_first in (True, False):
        texts = [folded(conversation(" ".join(turns[:end])), keeps_first=keeps_first) for end in range(2, len(turns))]
        for before, after in pairwise(texts):
            assert after[: len(before) - 1] == before[:-1]
            assert after[len(before) - 1]["content"].startswith(before[-1]["content"])


def test_many_in_a_row_take_no_longer_each() -> None:
    messages = [{"role": "user", "content": "x"}, *[{"role": "system", "content": "y" * 200}] * 60_000]
    start = time.process_time()
    assert len(folded(messages, keeps_first=True)) == 1
    assert time.process_time() - start < 5
