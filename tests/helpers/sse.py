"""Reads server-sent events as a strict client would."""

from __future__ import annotations

import json
from typing import Any


def events(stream: bytes) -> list[dict[str, Any]]:
    """The JSON of each event of a complete stream, which must end with exactly one [DONE]."""
    assert stream.endswith(b"data: [DONE]\n\n")
    assert stream.count(b"[DONE]") == 1
    return chunks(stream.removesuffix(b"data: [DONE]\n\n"))


def chunks(stream: bytes) -> list[dict[str, Any]]:
    """The JSON of each event of a stream, or of its beginning. Every data line must be one line to any reader."""
    parsed = []
    for event in stream.decode().split("\n\n")[:-1]:
        assert event.startswith("data: ")
        assert len(event.splitlines()) == 1
        parsed.append(json.loads(event.removeprefix("data: ")))
    return parsed


def text_of(parsed: list[dict[str, Any]], choice: int = 0) -> str:
    """The joined deltas of a choice."""
    parts = [item for event in parsed for item in event["choices"] if item["index"] == choice]
    return "".join(part["text"] if "text" in part else part["delta"].get("content", "") for part in parts)
