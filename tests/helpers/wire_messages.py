"""Hypothesis strategies for every message, derived from the annotations: a new message needs none of its own.

The payload that belongs to a header cannot be told from the annotations; ``messages`` mends headers and draws
frames so that they fit.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from functools import cache
from typing import Any

from hypothesis import strategies as st

from tokservice.wire import codec
from tokservice.wire.messages import (
    TAGS,
    Abort,
    Accepted,
    Answered,
    Begin,
    BodyChunk,
    EngineOutputs,
    FinishReason,
    Generate,
    Hello,
    Message,
    Prepare,
    Progress,
    PromptLogprobs,
    Publish,
    ReadyBytes,
    Rejected,
    Role,
    Route,
    Submit,
    Undelivered,
)

INTS = st.integers(-(2**63), 2**64 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: INTS,
    bool: st.booleans(),
    str: TEXT,
    float: st.floats(allow_nan=False),
}
ROUTES = st.sampled_from([int(route) for route in Route])
REASONS = st.sampled_from([int(reason) for reason in FinishReason])
CHOICES = st.integers(0, codec.MAX_CHOICES - 1)
PAYLOAD = st.binary(max_size=64)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of an annotated type, any that the wire can carry."""
    if kind in SCALARS:
        return SCALARS[kind]
    if typing.get_origin(kind) is tuple:
        return st.lists(values_of(typing.get_args(kind)[0]), max_size=4).map(tuple)
    return parts(kind)


@cache  # to make a strategy anew for each example takes longer than to draw from it
def parts(kind: type) -> st.SearchStrategy[Any]:
    """Instances of a dataclass, without frames."""
    hints = typing.get_type_hints(kind)
    fields = {item.name: values_of(hints[item.name]) for item in dataclasses.fields(kind) if item.name != "frames"}
    return st.builds(kind, **fields)


@st.composite
def messages(draw: st.DrawFn, kinds: Sequence[type[Message]] = tuple(TAGS.values())) -> Message:
    """Valid messages of every class."""
    kind: Any = draw(st.sampled_from(kinds))
    message: Any = draw(parts(kind))
    fit = _FITS.get(type(message))
    fitting: Message = dataclasses.replace(message, **fit(draw, message)) if fit else message
    return fitting


def _ids(draw: st.DrawFn, num_tokens: int) -> bytes:
    return draw(st.binary(min_size=4 * num_tokens, max_size=4 * num_tokens))


def _few_ids(draw: st.DrawFn) -> bytes:
    return _ids(draw, draw(st.integers(0, 4)))


def _submit(draw: st.DrawFn, _: Submit) -> dict[str, Any]:
    return {"route": draw(ROUTES), **_chunk(draw, _)}


def _chunk(draw: st.DrawFn, _: Submit | BodyChunk) -> dict[str, Any]:
    return {"frames": draw(st.lists(PAYLOAD, max_size=3).map(tuple))}


def _abort(draw: st.DrawFn, _: Abort) -> dict[str, Any]:
    return {"choice": draw(CHOICES | st.just(-1))}


def _prepare(draw: st.DrawFn, _: Prepare) -> dict[str, Any]:
    return {
        "attempt": draw(st.integers(1, 2**64 - 1)),
        "route": draw(ROUTES),
        "frames": draw(st.lists(PAYLOAD, max_size=4).map(tuple)),
    }


def _accepted(draw: st.DrawFn, _: Accepted) -> dict[str, Any]:
    prompts = [_few_ids(draw) for _ in range(draw(st.integers(1, 3)))]
    return {
        "num_choices": draw(st.integers(1, codec.MAX_CHOICES)),
        "num_prompt_tokens": draw(st.integers(0, 2**64 - 1)),
        "frames": (draw(PAYLOAD), draw(PAYLOAD), *prompts),
    }


def _one(draw: st.DrawFn, _: Rejected | Answered | Publish) -> dict[str, Any]:
    return {"frames": (draw(PAYLOAD),)}


def _outputs(draw: st.DrawFn) -> dict[str, Any]:
    outputs = [_few_ids(draw) for _ in range(draw(st.integers(0, 3)))]
    has_notes = draw(st.booleans())
    notes = [draw(PAYLOAD) for _ in outputs] if has_notes else []
    return {
        "num_delivered": tuple(draw(st.integers(0, len(ids) // 4)) for ids in outputs),
        "finished": tuple(draw(REASONS) for _ in outputs),
        "has_notes": has_notes,
        "frames": (*outputs, *notes),
    }


def _generate(draw: st.DrawFn, _: Generate) -> dict[str, Any]:
    fit = _outputs(draw)
    prompts = [_few_ids(draw) for _ in range(draw(st.integers(1, 3)))]
    fit["frames"] = (draw(PAYLOAD), draw(PAYLOAD), *prompts, *fit["frames"])
    return {"num_prompts": len(prompts), **fit}


def _begin(draw: st.DrawFn, _: Begin) -> dict[str, Any]:
    fit = _outputs(draw)
    fit["frames"] = (draw(PAYLOAD), *fit["frames"])
    return fit


def _columns(draw: st.DrawFn, num_rows: int, **of: st.SearchStrategy[Any]) -> dict[str, Any]:
    return {
        name: draw(st.lists(strategy, min_size=num_rows, max_size=num_rows).map(tuple)) for name, strategy in of.items()
    }


def _engine_outputs(draw: st.DrawFn, _: EngineOutputs) -> dict[str, Any]:
    fit = _columns(
        draw,
        draw(st.integers(0, 4)),
        request_ids=TEXT,
        attempts=INTS,
        choices=CHOICES,
        num_tokens=st.integers(0, 4),
        finish_reasons=REASONS,
        num_top=st.integers(-1, 3),
        num_cached_tokens=st.integers(0, 2**63),
    )
    fit["num_top"] = draw(st.sampled_from([(), fit["num_top"]]))
    fit["num_cached_tokens"] = draw(st.sampled_from([(), fit["num_cached_tokens"]]))
    frames = [_ids(draw, sum(fit["num_tokens"]))]
    if fit["num_top"]:
        entries = sum(n * (1 + top) for n, top in zip(fit["num_tokens"], fit["num_top"], strict=True))
        frames += [_ids(draw, entries), _ids(draw, entries)]
    return {**fit, "frames": tuple(frames)}


def _prompt_logprobs(draw: st.DrawFn, _: PromptLogprobs) -> dict[str, Any]:
    num_top, num_tokens = draw(st.integers(0, 3)), draw(st.integers(0, 4))
    frame = _ids(draw, num_tokens * (1 + num_top))
    return {"choice": draw(CHOICES), "num_top": num_top, "frames": (frame, frame)}


def _progress(draw: st.DrawFn, _: Progress) -> dict[str, Any]:
    fit = _columns(
        draw,
        draw(st.integers(0, 4)),
        request_ids=TEXT,
        attempts=INTS,
        choices=CHOICES,
        num_tokens=st.integers(0, 4),
        finish_reasons=REASONS,
        statuses=INTS,
        flags=INTS,
        num_bytes=st.integers(0, 16),
        num_note_bytes=st.integers(0, 16),
    )
    fit["num_note_bytes"] = draw(st.sampled_from([(), fit["num_note_bytes"]]))
    frames = [_ids(draw, sum(fit["num_tokens"])), b"x" * sum(fit["num_bytes"])]
    if fit["num_note_bytes"]:
        frames.append(b"n" * sum(fit["num_note_bytes"]))
    return {**fit, "frames": tuple(frames)}


def _ready_bytes(draw: st.DrawFn, _: ReadyBytes) -> dict[str, Any]:
    num_rows = draw(st.integers(0, 4))
    fit = _columns(draw, num_rows, request_ids=TEXT, statuses=INTS, flags=INTS, num_bytes=st.integers(0, 16))
    return {**fit, "frames": (b"x" * sum(fit["num_bytes"]),)}


def _undelivered(draw: st.DrawFn, _: Undelivered) -> dict[str, Any]:
    return _columns(draw, draw(st.integers(0, 4)), request_ids=TEXT, attempts=INTS)


def _hello(draw: st.DrawFn, _: Hello) -> dict[str, Any]:
    role = draw(st.sampled_from(Role))
    slot, incarnation = draw(st.integers(0, 999_999_999)), draw(st.integers(0, 999_999_999))
    return {
        "identity": f"{role.label}.{slot}.{incarnation}",
        "role": int(role),
        "capacity": draw(st.integers(0, 2**64 - 1)),
    }


_FITS: dict[type, Any] = {
    Submit: _submit,
    BodyChunk: _chunk,
    Abort: _abort,
    Prepare: _prepare,
    Accepted: _accepted,
    Rejected: _one,
    Answered: _one,
    Generate: _generate,
    Undelivered: _undelivered,
    Begin: _begin,
    EngineOutputs: _engine_outputs,
    PromptLogprobs: _prompt_logprobs,
    Progress: _progress,
    ReadyBytes: _ready_bytes,
    Hello: _hello,
    Publish: _one,
}
